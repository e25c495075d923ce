"""Learned state of one deployment, of records of ``cells``, and its text in the ConfigMap ``<name>-state``. Pure."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

from pydantic import Field

from specdecode_operator.api.v1alpha1 import Decision
from specdecode_operator.state.cells import (
    AcceptanceCell,
    CreditCell,
    DraftEstimates,
    ForecastState,
    GainMeasurement,
    LoadState,
    MergeChoice,
    PodState,
    PodTaskState,
    RequestCell,
    RowState,
    ScalingState,
    StepTimeCell,
    Stored,
    TemplateState,
    TrafficCell,
)
from specdecode_operator.state.drift_state import DriftState
from specdecode_worker.contract import Plan

__all__ = [
    "MAX_TEMPLATE_BYTES",
    "AcceptanceCell",
    "DraftEstimates",
    "ForecastState",
    "GainMeasurement",
    "LearnedState",
    "LoadState",
    "PodState",
    "PodTaskState",
    "RequestCell",
    "RowState",
    "ScalingState",
    "StepTimeCell",
    "TemplateState",
    "TrafficCell",
    "parse_state",
    "render_state",
]

FORMAT = 1
STATE_KEY = "state"
"""Entry of the ConfigMap: JSON, compressed by zlib, in base64."""
MAX_STATE_BYTES = 640 * 1024
"""Bound of the entry; a ConfigMap has at most 1 MiB. 8 tasks, 64 sequences and 5 drafts make 200 KiB."""
MAX_CONTENT_BYTES = 16 * 1024 * 1024
"""Longest decompressed state, against data that expands without end."""
MAX_TEMPLATE_BYTES = 20 * 1024
MAX_PARKED_DRAFTS = 4
"""Drafts whose estimates are parked: those of a canary, a rollback and two experiments."""


class LearnedState(Stored):
    """Everything that survives a restart of the operator."""

    format: int = FORMAT
    uid: str = ""
    draft: str = ""
    """Hash of the current draft: the one that most workers run. The estimates below are of this draft."""
    plan: Plan | None = None
    """The published plan. Its version never falls."""
    rows: tuple[RowState, ...] = ()
    swept_at: float = 0
    """Time when the rows of all loads were last chosen."""
    acceptance: tuple[AcceptanceCell, ...] = ()
    credit: tuple[CreditCell, ...] = ()
    merges: tuple[MergeChoice, ...] = ()
    requests: tuple[RequestCell, ...] = ()
    traffic: tuple[TrafficCell, ...] = ()
    prefill: tuple[float, ...] = ()
    """Decayed moments of the steps with prefill, all kinds together, in the order of counters.Moments."""
    costs: tuple[StepTimeCell, ...] = ()
    """Step times. Those without draft passes do not depend on the draft."""
    wander: float = 0.0025
    """Relative variance of the mean of one kind of step from poll to poll, beyond noise: neighbours, clocks, heat.

    The default, five percent squared, holds until it was measured.
    """
    load: LoadState = LoadState()
    scaling: ScalingState = ScalingState()
    forecast: ForecastState = ForecastState()
    pods: tuple[PodState, ...] = ()
    recycled_at: float | None = None
    """Time when a pod was last replaced because of its acceptance."""
    recycling: str = ""
    """Uid of the pod that is to be evicted for its acceptance, until its eviction is observed."""
    startup_seconds: float | None = None
    """Time from a pod's creation until it was ready, as last observed."""
    history: tuple[Decision, ...] = Field(default=(), max_length=10)
    following: tuple[GainMeasurement, ...] = Field(default=(), max_length=10)
    pin: str = ""
    """The pin in force: the last one that could be read."""
    steering: str = ""
    """Mode or pin that the plan last followed, as text."""
    saved_device_seconds: float = 0.0
    """Device seconds that speculation saved so far against plain decoding of the same tokens; losses are negative."""
    revisions: dict[str, str] = Field(default={})
    """Commits of models whose URI names none, by URI."""
    drift: DriftState = DriftState()
    template: TemplateState | None = None
    """The applied pod template."""
    parked: tuple[DraftEstimates, ...] = Field(default=(), max_length=MAX_PARKED_DRAFTS)
    """Estimates of drafts that are not current, the most recently used first."""


def render_state(learned: LearnedState) -> dict[str, str]:
    """Return the entry of the ConfigMap. Equal states give equal text.

    Parked drafts that do not fit into MAX_STATE_BYTES are left out, the least recently used first.
    """
    text = base64.b64encode(zlib.compress(learned.model_dump_json(by_alias=True).encode())).decode()
    if len(text) > MAX_STATE_BYTES and learned.parked:
        return render_state(learned.model_copy(update={"parked": learned.parked[:-1]}))
    return {STATE_KEY: text}


def parse_state(data: Mapping[str, str], uid: str) -> LearnedState | None:
    """Return the state that ``render_state`` wrote, or None if there is none or it is of another deployment.

    Raises:
        ValueError: The state cannot be read.
    """
    if STATE_KEY not in data:
        return None
    expander = zlib.decompressobj()
    try:
        content = expander.decompress(base64.b64decode(data[STATE_KEY], validate=True), MAX_CONTENT_BYTES)
    except zlib.error as error:
        raise ValueError(f"the data is not valid: {error}") from error
    if not expander.eof:
        raise ValueError("the data is not valid: it is cut off or too long")
    learned = LearnedState.model_validate_json(content)
    if learned.format > FORMAT:
        raise ValueError(f"format {learned.format} is of a newer operator; this one reads {FORMAT}")
    return learned if learned.uid == uid else None
