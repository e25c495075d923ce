"""Records that make up the learned state of one deployment: estimates, rows, load, scaling, pods, template. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from specdecode_worker.contract import TreeShape

DIGITS = 6
"""Significant digits of estimates. Fewer would lose variances, which are small differences of large sums."""


def rounded(value: float) -> float:
    """Return ``value`` at DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


class Stored(BaseModel):
    """Base of all persisted records. Fields that a newer operator added are ignored on reading."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class AcceptanceCell(Stored):
    """Acceptance of one task at one depth: decayed numbers of accepted and of all drafted tokens.

    The newest of them are also counted apart, until there are enough to test whether they contradict the older ones.
    """

    task: str
    depth: int
    hits: float
    """Drafted tokens that were the target's choice."""
    total: float
    """All drafted tokens."""
    at: float
    """Time of the last update, in seconds since the epoch (the operator's clock, as all times here)."""
    new_hits: float = 0
    new_total: float = 0
    changed_at: float = 0
    """Time when new evidence last contradicted the older evidence."""
    parent: Literal["main", "sibling"] = "main"
    """``main`` if every token on the path to the parent had rank 0."""
    ranks: tuple[float, ...] = ()
    """Counts of target tokens that had rank 1, 2, ... in the draft; trailing zeros are left out."""


class CreditCell(AcceptanceCell):
    """Acceptance of one draft, in its own order, in the trees of a task that merges drafts."""

    draft: str = ""
    """Hash of the draft; empty for the common order of all drafts, at the same nodes."""


class MergeChoice(Stored):
    """Drafts that are merged with the draft of one task. Without a choice all declared ones are."""

    task: str
    drafts: tuple[str, ...]
    """Names of the drafts that take part, in the order of the spec."""
    declared: tuple[str, ...]
    """Names of all drafts in ``merge`` of the task."""
    hashes: tuple[str, ...] = ()
    """Hashes of the task's own draft and of the declared ones; empty where no worker reported it."""
    since: float = 0
    """Time of the last change; 0 before the first."""
    before: tuple[str, ...] | None = None
    """Drafts that took part before the trial that runs now. None without a trial."""
    moves: tuple[float, ...] = ()
    """Times of the changes within the last hour; the end of a trial does not count."""
    loss: float = 0
    """Relative time per token that the dropped drafts cost, as far as it was measured."""
    reason: str = ""
    """Reason why drafts are left out; empty if all take part."""


class TrafficCell(Stored):
    """Decayed sums of one task's traffic, in the order of TrafficSums."""

    task: str
    sums: tuple[float, float, float, float, float]


class RequestCell(Stored):
    """Decayed sums of one task's finished requests, in the order of RequestSums."""

    task: str
    sums: tuple[float, float, float, float, float, float]


class StepTimeCell(Stored):
    """Decayed moments of the times of one kind of step. ``values`` is in the order of counters.Moments."""

    tokens_bucket: int
    draft_passes: int
    prefill: bool
    context_bucket: int
    values: tuple[float, ...]
    at: float
    new_values: tuple[float, ...] = ()
    """The newest steps apart, until there are enough to test whether they contradict the older ones."""
    polls: float = 1
    """Decayed number of polls that the steps came from."""
    changed_at: float = 0
    """Time when new steps last contradicted the older ones."""
    made_up: float = 0
    """Decayed number of steps that a worker ran to measure their time. Their emitted tokens are not counted."""


class RowState(Stored):
    """State of one plan row: its shape, and the times of its last changes. planning.row_states reads its state."""

    concurrency: int
    context: int
    task: str
    depth: int
    since: float = 0
    """Time of the last change, or of the joint choice that left the row as it was; 0 if it follows other rows."""
    trial: bool = False
    """True while a shape runs to be timed: one that never was, or speculation again after plain decoding."""
    parents: tuple[int, ...] = ()
    """Parents of a tree's nodes; empty for the chain of ``depth``."""
    moves: tuple[float, ...] = ()
    """Times of the changes within the last hour; the end of a trial does not count."""

    @property
    def load(self) -> tuple[int, int]:
        """Load of the row: its buckets of concurrency and context."""
        return self.concurrency, self.context

    @property
    def shape(self) -> TreeShape:
        return _shape(self.parents, self.depth)

    def running(self, shape: TreeShape, **more: Any) -> RowState:
        """Return this row with another shape, and with ``more`` fields replaced."""
        parents = () if shape.is_chain else shape.parents
        return self.model_copy(update={"depth": shape.depth, "parents": parents, **more})


@lru_cache(maxsize=512)
def _shape(parents: tuple[int, ...], depth: int) -> TreeShape:
    """Return the shape, cached, because validation is slow and rows are asked for their shapes all the time."""
    return TreeShape(parents) if parents else TreeShape.chain(depth)


class DraftEstimates(Stored):
    """Everything measured with one draft that is not in use, and its rows."""

    draft: str
    acceptance: tuple[AcceptanceCell, ...] = ()
    requests: tuple[RequestCell, ...] = ()
    costs: tuple[StepTimeCell, ...] = ()
    """Step times with at least one draft pass."""
    rows: tuple[RowState, ...] = ()


class LoadState(Stored):
    """The last observed load. It names the row that status shows while the deployment is idle."""

    sequences: float = 1
    context_bucket: int = 0
    task: str = "other"
    at: float = 0


class GainMeasurement(Stored):
    """A plan change whose gain is being measured. ``time``, ``before`` and ``after`` identify its decisions."""

    time: str
    before: str
    after: str
    rows: tuple[tuple[int, int, str], ...]
    """Concurrency bucket, context bucket and task of the rows that changed."""
    before_seconds: float = 0
    """Time that the tokens emitted since would have taken with the old shape, in sequence-seconds."""
    seconds: float = 0
    """Time that they took."""
    drafts: float = 0
    """Steps of a sequence since the change."""


class ScalingState(Stored):
    """State of the replica decision: recent demand, owner of the replicas, and workers without a node.

    Times are in seconds since the epoch.
    """

    replicas: int | None = None
    """Replicas that were set last."""
    spec_replicas: int | None = None
    """spec.replicas at that decision. None before the first one."""
    owned: bool = False
    """The operator owned the replicas at that decision."""
    wanted: int | None = None
    """Workers that demand asked for, without bounds."""
    above_polls: int = 0
    """Consecutive polls with more demand than workers."""
    below_since: float | None = None
    """Start of the period with less demand than workers; polls without complete readings move it forward."""
    low_needs: tuple[tuple[float, int], ...] = ()
    """Workers for the demand in that period, within the scale-down window: times with numbers, each higher than all
    later ones. The first is the highest."""
    unplaced_since: float | None = None
    """Time since which some workers have no node."""
    placed_limit: int | None = None
    """Upper bound of the replicas until ``retry_at``, after workers without a node were withdrawn."""
    retry_at: float | None = None
    """Time at which more workers are tried again."""
    withdrawals: int = 0
    """Consecutive withdrawals; each doubles the time until the next try."""
    idle_since: float | None = None
    """Start of the present period without requests, where minReplicas is 0."""


class ForecastState(Stored):
    """Arrivals per second: level, trend, and pattern by time of day."""

    level: float = 0
    trend: float = 0
    """Change of the level per second."""
    error: float = 0
    """Mean absolute error of a forecast one sample ahead."""
    seasons: tuple[float, ...] = ()
    """By half hour of the day (UTC); -1 where nothing was observed."""
    at: float | None = None
    arrivals: float = 0
    """Arrivals since the last sample, in ``seconds``."""
    seconds: float = 0


class PodTaskState(Stored):
    """Acceptance of the first drafted token of one task on one pod: recent and past."""

    task: str
    hits: float = 0
    total: float = 0
    past_hits: float = 0
    past_total: float = 0


class PodState(Stored):
    """Recent figures of one pod, compared with its own past."""

    uid: str
    boot: str = ""
    draft: str = ""
    tasks: tuple[PodTaskState, ...] = ()
    requests: tuple[float, float, float, float, float, float] = (0, 0, 0, 0, 0, 0)
    """Decayed sums of its finished requests over all tasks, in the order of RequestSums."""
    pace: float | None = None
    """Logarithm of its step times relative to the fleet."""
    doubts: int = 0
    """Consecutive polls that indicate a collapse of acceptance."""
    noticed: bool = False
    """True if it seems worse than its past and its peers. Its figures are then not added to its past."""
    collapsed_since: float | None = None
    slow_since: float | None = None
    at: float = 0


class TemplateState(Stored):
    """The applied pod template, and the hash of the part of the spec that it was made from."""

    spec_hash: str
    template: dict[str, Any]
    image: str
