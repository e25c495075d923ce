"""What the operator keeps of one deployment for good: the JSON in the ConfigMap ``<name>-state``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdecode_operator.api.v1alpha1 import Decision
from specdecode_worker.contract import Plan, TreeShape

MAX_STATE_BYTES = 64 * 1024
MAX_TEMPLATE_BYTES = 20 * 1024
MAX_LEARNED_BYTES = 40 * 1024


class Stored(BaseModel):
    """Base of what is written down: fields of a newer operator are ignored, so that a downgrade keeps its memory."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class AcceptanceCell(Stored):
    """Acceptance of one task at one depth: decayed hits and totals. ``at`` is the operator's clock.

    The newest of them are also kept apart, until there are enough to say whether they contradict the others.
    """

    task: str
    depth: int
    hits: float
    total: float
    at: float
    new_hits: float = 0
    new_total: float = 0
    changed_at: float = 0
    """When new evidence contradicted the older last."""
    parent: Literal["main", "sibling"] = "main"
    """Whether the path to the parent was rank 0 all along."""
    ranks: tuple[float, ...] = ()
    """How often the target's token had rank 1, 2, ...; trailing zeros are left out."""


class TrafficCell(Stored):
    """Decayed sums of one task's traffic, in the order of TrafficSums."""

    task: str
    sums: tuple[float, float, float, float, float]


class RequestCell(Stored):
    """Decayed sums of one task's finished requests, in the order of RequestSums."""

    task: str
    sums: tuple[float, float, float, float, float, float]


class StepTimeCell(Stored):
    """Decayed moments of one kind of step; ``values`` as in sums.Moments, the newest of them also apart."""

    tokens_bucket: int
    draft_passes: int
    prefill: bool
    context_bucket: int
    values: tuple[float, ...]
    at: float
    new_values: tuple[float, ...] = ()
    polls: float = 1
    """Decayed number of polls that the steps came in."""
    spells: float = 1
    """The same of minutes: how often the weather of the machine may have changed meanwhile."""
    spell_at: float = 0
    """When the last of them began."""
    changed_at: float = 0
    """When new steps contradicted the older ones last."""
    made_up: float = 0
    """Decayed number of the steps that a worker made up to time them: what they emitted is no answer, and left out."""


class RowState(Stored):
    """One row of the plan: what it runs, since when, and how patient to be with speculation that lost there."""

    concurrency: int
    context: int
    task: str
    depth: int
    since: float = 0
    stays: bool = False
    """Was chosen to stay when the row of ``other`` moved: it follows nobody, even if it never moves itself."""
    off_until: float = 0
    patience: float = 0
    probing: bool = False
    """Speculation runs to be measured again; no verdict before there are new steps."""
    trial: bool = False
    """The shape runs to be timed, for nobody could say what it costs; it goes back at first doubt."""
    parents: tuple[int, ...] = ()
    """Of a tree; empty for the chain of ``depth``."""
    moves: tuple[float, ...] = ()
    """When it moved within the last hour, but for probes."""
    no_trial_until: float = 0
    trial_patience: float = 0
    """What is waited after the next trial; it grows while trials are in vain."""

    @property
    def shape(self) -> TreeShape:
        return _shape(self.parents, self.depth)

    def running(self, shape: TreeShape, **more: Any) -> RowState:
        """This row with another shape."""
        parents = () if shape.is_chain else shape.parents
        return self.model_copy(update={"depth": shape.depth, "parents": parents, **more})


@lru_cache(maxsize=512)
def _shape(parents: tuple[int, ...], depth: int) -> TreeShape:
    """Made once: a shape is validated, and rows are asked for theirs all the time."""
    return TreeShape(parents) if parents else TreeShape.chain(depth)


class LoadState(Stored):
    """The load that was last seen: it names the row that status shows while the deployment idles."""

    sequences: float = 1
    context_bucket: int = 0
    task: str = "other"
    at: float = 0


class GainMeasurement(Stored):
    """A change of the plan whose gain is still being measured; time, before and after name its decisions."""

    time: str
    before: str
    after: str
    rows: tuple[tuple[int, int, str], ...]
    """Concurrency and context bucket and task of the rows that moved."""
    before_seconds: float = 0
    """What the tokens emitted since would have taken with the shape before, in sequence-seconds."""
    seconds: float = 0
    """What they took."""
    drafts: float = 0
    """Steps of a sequence since."""


class ScalingState(Stored):
    """Demand's recent past, for 'up on two polls' and 'down only after the window'."""

    replicas: int | None = None
    wanted: int | None = None
    above_polls: int = 0
    below_since: float | None = None
    """Moved on by polls that cannot be trusted."""


class ForecastState(Stored):
    """Arrivals a second: of the last minutes, their trend, and by time of day."""

    level: float = 0
    trend: float = 0
    """Of the level, per second."""
    error: float = 0
    """Mean absolute error of one sample ahead."""
    seasons: tuple[float, ...] = ()
    """By half hour of the day (UTC); -1 where none was seen yet."""
    at: float | None = None
    arrivals: float = 0
    """Since the last sample, in ``seconds``."""
    seconds: float = 0


class PodTaskState(Stored):
    """How often the first drafted token of one task was right on one pod: now, and in the past."""

    task: str
    hits: float = 0
    total: float = 0
    past_hits: float = 0
    past_total: float = 0


class PodState(Stored):
    """One pod against its own past. Times are the operator's clock."""

    uid: str
    boot: str = ""
    draft: str = ""
    tasks: tuple[PodTaskState, ...] = ()
    requests: tuple[float, float, float, float, float, float] = (0, 0, 0, 0, 0, 0)
    """Decayed sums of its finished requests, all tasks together, in the order of RequestSums."""
    pace: float | None = None
    """Logarithm of its step times over the fleet's."""
    doubts: int = 0
    """Polls in a row that looked like a collapse."""
    noticed: bool = False
    """It seems to do worse than it used to and than its peers: what it does does not become its past."""
    collapsed_since: float | None = None
    slow_since: float | None = None
    at: float = 0


class TemplateState(Stored):
    """The pod template that is applied, and the hash of the part of the spec that it was made of."""

    spec_hash: str
    template: dict[str, Any]
    image: str


class LearnedState(Stored):
    """What survives a restart of the operator."""

    format: int = 1
    uid: str = ""
    draft: str = ""
    """Hash of the draft that the estimates are of."""
    plan: Plan | None = None
    """The plan that is out; its version only rises."""
    rows: tuple[RowState, ...] = ()
    swept_at: float = 0
    """When the rows of all loads were looked at last."""
    acceptance: tuple[AcceptanceCell, ...] = ()
    requests: tuple[RequestCell, ...] = ()
    traffic: tuple[TrafficCell, ...] = ()
    prefill: tuple[float, ...] = ()
    """Decayed moments of the steps with prefill, all kinds together; values as in sums.Moments."""
    costs: tuple[StepTimeCell, ...] = ()
    wander: float = 0.0025
    """Relative variance of a kind of step's mean from poll to poll, beyond noise: neighbours, clocks, temperature.

    Until it was seen, five percent are taken for granted.
    """
    load: LoadState = LoadState()
    scaling: ScalingState = ScalingState()
    forecast: ForecastState = ForecastState()
    pods: tuple[PodState, ...] = ()
    recycled_at: float | None = None
    """When a pod was last replaced for its acceptance."""
    startup_seconds: float | None = None
    """From a pod's making to its being ready, as seen last."""
    history: tuple[Decision, ...] = Field(default=(), max_length=10)
    following: tuple[GainMeasurement, ...] = Field(default=(), max_length=10)
    pin: str = ""
    """The pin in force: the last one that read."""
    steering: str = ""
    """Mode or pin that the plan followed last, in words."""
    saved_device_seconds: float = 0.0
    """Device seconds that speculation saved so far against plain decoding of the same tokens; losses are negative."""
    template: TemplateState | None = Field(default=None, exclude=True)
    """Stored under a key of its own."""


def render_state(learned: LearnedState) -> dict[str, str]:
    """The data of the state ConfigMap, within its bound: the least visited cost cells go first, then pods."""
    text = learned.model_dump_json(by_alias=True)
    while len(text.encode()) > MAX_LEARNED_BYTES and learned.costs:
        heaviest = sorted(learned.costs, key=lambda cell: -cell.values[0])
        learned = learned.model_copy(update={"costs": tuple(heaviest[: len(heaviest) * 3 // 4])})
        text = learned.model_dump_json(by_alias=True)
    if len(text.encode()) > MAX_LEARNED_BYTES:
        # Hundreds of pods: only those under suspicion have a past that matters to others than themselves.
        pods = tuple(pod for pod in learned.pods if pod.collapsed_since is not None)[:64]
        text = learned.model_copy(update={"pods": pods}).model_dump_json(by_alias=True)
    template = learned.template.model_dump_json() if learned.template else ""
    return {"memory.json": text, "template.json": template}


def parse_state(data: Mapping[str, str], uid: str) -> LearnedState | None:
    """Reads ``state_data`` back; None when it is another deployment's or of no use. Raises ValueError on garbage."""
    learned = LearnedState.model_validate_json(data.get("memory.json", ""))
    if learned.uid != uid:
        return None
    template = data.get("template.json")
    return learned.model_copy(update={"template": TemplateState.model_validate_json(template) if template else None})
