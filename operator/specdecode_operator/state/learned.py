"""Learned state of one deployment, and its text in the sections of the ConfigMap ``<name>-state``. Pure.

``sections`` has the registry of sections, ``compact`` their encoding, ``cells`` the records in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from specdecode_operator.api.v1alpha1 import Decision
from specdecode_operator.state import trimming
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
from specdecode_operator.state.compact import encode
from specdecode_operator.state.drift_state import DriftState
from specdecode_operator.state.section_texts import Json, decode_sections, draft_text, parked_text, restored, size_of
from specdecode_operator.state.sections import (
    ESTIMATES,
    MAX_PARKED_DRAFTS,
    MAX_STATE_BYTES,
    MAX_TEMPLATE_BYTES,
    META,
    SECTIONS,
    TEMPLATE,
    draft_key,
    fields_of,
    unknown_sections,
    version_of,
)
from specdecode_operator.state.step_moments import shorten_cell
from specdecode_operator.telemetry.counters import CellKey
from specdecode_worker.contract import Plan

__all__ = [
    "MAX_STATE_BYTES",
    "MAX_TEMPLATE_BYTES",
    "AcceptanceCell",
    "DraftEstimates",
    "ForecastState",
    "GainMeasurement",
    "LearnedState",
    "LoadState",
    "PodState",
    "PodTaskState",
    "RenderedState",
    "RequestCell",
    "RowState",
    "ScalingState",
    "StepTimeCell",
    "StoredState",
    "TemplateState",
    "TrafficCell",
    "parse_state",
    "read_state",
    "render_state",
    "write_state",
]


class LearnedState(Stored):
    """Everything that survives a restart of the operator."""

    format: int = 2
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
    template: TemplateState | None = Field(default=None, exclude=True)
    """The applied pod template. Left out of dumps; it has a section of its own."""
    parked: tuple[DraftEstimates, ...] = Field(default=(), max_length=MAX_PARKED_DRAFTS, exclude=True)
    """Estimates of drafts that are not current, the most recently used first. Left out of dumps, as ``template``."""


@dataclass(frozen=True, slots=True)
class RenderedState:
    """Sections as text, by key, and what did not fit into MAX_STATE_BYTES."""

    data: dict[str, str]
    dropped: Mapping[str, int]
    """Numbers of records that were left out, by what they are."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """Content of a ConfigMap that was read."""

    learned: LearnedState | None
    """None if there is no state of this deployment."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Sections of a newer operator."""
    problems: tuple[str, ...] = ()
    """Sections that could not be read, with the reason."""


def render_state(learned: LearnedState) -> dict[str, str]:
    """Return the sections of ``learned`` as text, by key."""
    return write_state(learned).data


def write_state(learned: LearnedState) -> RenderedState:
    """Return the sections of ``learned`` within MAX_STATE_BYTES, and what had to be left out for it.

    The least visited step times of parked drafts go first, then figures of healthy pods, then parked drafts, the least
    recently used first, and at last the least visited step times of the current draft.
    """
    data = _sections(learned, {})
    dropped: dict[str, int] = {}
    while (excess := size_of(data) - MAX_STATE_BYTES) > 0:
        of_drafts = sum(len(text) for key, text in data.items() if key.startswith(ESTIMATES))
        # About half of these sections are step times, and a few too many left out cost less than one more round.
        step = trimming.next_step(learned.parked, learned.pods, learned.costs, 1 - 2 * excess / (of_drafts + 1))
        if step is None:
            break
        learned = learned.model_copy(update={step.field: step.records})
        dropped = {**dropped, step.what: dropped.get(step.what, 0) + step.dropped}
        data = _sections(learned, dropped)
    return RenderedState(data, dropped)


def parse_state(data: Mapping[str, str], uid: str) -> LearnedState | None:
    """Return the state that ``render_state`` wrote, or None if it is of another deployment or absent.

    Raises:
        ValueError: No section could be read.
    """
    stored = read_state(data, uid)
    if stored.learned is None and stored.problems:
        raise ValueError("; ".join(stored.problems))
    return stored.learned


def read_state(data: Mapping[str, str], uid: str, *, is_owned: bool = False) -> StoredState:
    """Return the state of the deployment ``uid``. A section that cannot be read is left out, and the others stay.

    Args:
        data: Of the ConfigMap, in this format or in the one before sections.
        uid: Of the deployment.
        is_owned: The ConfigMap's owner reference has this uid, so that ``meta`` is not needed as a proof.
    """
    if META not in data and "memory.json" in data:
        return _read_legacy(data, uid)
    contents, problems = decode_sections(data)
    meta = contents.pop(META, {})
    if meta.get("uid") != uid and (meta or not is_owned):
        return StoredState(None, problems=() if meta else (*problems, "section meta: it is missing or not valid"))
    fields, drafts = _validated(contents, problems)
    plan = fields.get("plan")
    draft = str(meta.get("draft", plan.draft if plan else ""))
    order = meta.get("parked")
    learned = LearnedState(uid=uid, draft=draft).model_copy(update=fields)
    learned = _with_drafts(learned, drafts, order if isinstance(order, list) else [])
    return StoredState(learned, unknown_sections(data), tuple(problems))


# --- writing ------------------------------------------------------------------------------------------------------


def _sections(learned: LearnedState, dropped: Mapping[str, int]) -> dict[str, str]:
    content = json.loads(learned.model_dump_json(by_alias=True))
    content["costs"] = [shorten_cell(cell) for cell in content["costs"] if not cell["draft_passes"]]
    meta = {
        "format": learned.format,
        "uid": learned.uid,
        "draft": learned.draft,
        "parked": [parked.draft for parked in learned.parked],
        "dropped": dict(dropped),
    }
    data = {META: encode(version_of(META), meta)}
    for section in SECTIONS:
        if section.fields and not (section.is_optional and not any(content[name] for name in section.fields)):
            data[section.name] = encode(section.version, {name: content[name] for name in section.fields})
    if learned.template:
        data[TEMPLATE] = encode(version_of(TEMPLATE), {"template": learned.template.model_dump(mode="json")})
    current = _current(learned)
    if current.acceptance or current.requests or current.costs:
        data[draft_key(current.draft)] = draft_text(current)
    return {**data, **{draft_key(parked.draft): parked_text(parked) for parked in learned.parked}}


def _current(learned: LearnedState) -> DraftEstimates:
    """Return the estimates of the current draft; its rows are in the section ``plan``."""
    return DraftEstimates(
        draft=learned.draft,
        acceptance=learned.acceptance,
        requests=learned.requests,
        costs=tuple(cell for cell in learned.costs if cell.draft_passes),
    )


# --- reading ------------------------------------------------------------------------------------------------------


def _validated(contents: Mapping[str, Json], problems: list[str]) -> tuple[Json, list[DraftEstimates]]:
    """Return the fields of LearnedState and the estimates of drafts; add to ``problems`` what is not valid."""
    fields: Json = {}
    drafts: list[DraftEstimates] = []
    for key, content in contents.items():
        try:
            if key.startswith(f"{ESTIMATES}."):
                drafts.append(DraftEstimates.model_validate_json(json.dumps(restored(content))))
                continue
            part = LearnedState.model_validate_json(json.dumps(restored(content)))
            fields |= {name: getattr(part, name) for name in fields_of(key) if name in content}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            problems.append(f"section {key}: {error}")
    return fields, drafts


def _with_drafts(learned: LearnedState, drafts: Iterable[DraftEstimates], order: list[Any]) -> LearnedState:
    """Return ``learned`` with the estimates of its current draft, and the others parked in ``order``."""
    by_draft = {estimates.draft: estimates for estimates in drafts}
    current = by_draft.pop(learned.draft, None)
    ranks = {str(draft): rank for rank, draft in enumerate(order)}
    parked = sorted(by_draft.values(), key=lambda estimates: ranks.get(estimates.draft, len(ranks)))
    learned = learned.model_copy(update={"parked": tuple(parked[:MAX_PARKED_DRAFTS])})
    if current is None:
        return learned
    costs = (*(cell for cell in learned.costs if not cell.draft_passes), *current.costs)
    return learned.model_copy(
        update={
            "acceptance": current.acceptance,
            "requests": current.requests,
            "costs": tuple(sorted(costs, key=CellKey.of)),
        }
    )


def _read_legacy(data: Mapping[str, str], uid: str) -> StoredState:
    """Return the state from the format before sections."""
    try:
        learned = LearnedState.model_validate_json(data["memory.json"])
        template = data.get("template.json")
        parsed = TemplateState.model_validate_json(template) if template else None
    except ValidationError as error:
        return StoredState(None, problems=(f"the state of an older operator: {error}",))
    if learned.uid != uid:
        return StoredState(None)
    learned = learned.model_copy(update={"format": 2, "template": parsed})
    return StoredState(learned, unknown_sections(data))
