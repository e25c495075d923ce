"""State of one deployment. Pure.

``LearnedState`` and the training runs of a ``DraftRecord`` survive a restart of the operator, in the
ConfigMap ``<name>-state``. The rest of a ``Session`` (the last report of each worker, the measurements of the last
minute) is lost with the process and collected again.
"""

from __future__ import annotations

import base64
import math
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdecode_operator.api.draft import Mode, Phase, TrialRecord
from specdecode_operator.api.v1alpha1 import Decision, DraftLineageStatus, DraftRunEndStatus
from specdecode_operator.drafts.drift import Baseline, ChainCounts, DriftDetector, LearningBaseline
from specdecode_operator.telemetry.counters import CellKey, Delta
from specdecode_worker.contract import Buckets, Plan, Report, TreeShape

# Records that make up the learned state of one deployment: estimates, rows, load, scaling, pods, template. Pure.

DIGITS = 6
"""Significant digits of estimates. Fewer would lose variances, which are small differences of large sums."""


def rounded(value: float) -> float:
    """Return ``value`` at DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def range_name(edges: tuple[int, ...], index: int) -> str:
    """Return the name of a bucket of concurrency or context, such as 1, 3-4 or >4."""
    if index == len(edges):
        return f">{edges[-1]}"
    low, high = edges[index - 1] + 1 if index else 1, edges[index]
    return str(high) if low == high else f"{low}-{high}" if index else f"<={high}"


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


class ContextCell(AcceptanceCell):
    """Acceptance of the first draft token of one task in steps of one context bucket."""

    context: int


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
    """State of one plan row: its shape, and the times of its last changes. planning.search reads its state."""

    concurrency: int
    context: int
    task: str
    depth: int
    since: float = 0
    """Time of the last change, or of the joint choice that left the row as it was; 0 if it follows other rows."""
    before: tuple[int, ...] | None = None
    """Parents of the shape that ran before a trial, while one runs: a shape runs to be timed. None without one."""
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

    @property
    def trial(self) -> bool:
        """True while a shape runs to be timed: one that never was, or speculation again after plain decoding."""
        return self.before is not None

    @property
    def settled_shape(self) -> TreeShape:
        """The shape, or that before a trial."""
        return self.shape if self.before is None else TreeShape(self.before)

    def running(self, shape: TreeShape, **more: Any) -> RowState:
        """Return this row with another shape, and with ``more`` fields replaced."""
        parents = () if shape.is_chain else shape.parents
        if not more and (self.depth, self.parents) == (shape.depth, parents):
            return self
        return self.model_copy(update={"depth": shape.depth, "parents": parents, **more})


@lru_cache(maxsize=512)
def _shape(parents: tuple[int, ...], depth: int) -> TreeShape:
    """Return the shape, cached, because validation is slow and rows are asked for their shapes all the time."""
    return TreeShape(parents) if parents else TreeShape.chain(depth)


class DraftEstimates(Stored):
    """Everything measured with one draft that is not in use, and its rows."""

    draft: str
    acceptance: tuple[AcceptanceCell, ...] = ()
    contexts: tuple[ContextCell, ...] = ()
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

    def row(self, found: Buckets) -> tuple[int, int]:
        """Return the buckets (concurrency, context) of this load."""
        # The mean counts as the next whole number: with the nearest one, changes are followed later (simulator.md).
        return bisect_left(found.concurrency, self.sequences), min(self.context_bucket, len(found.context))


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
    """State of the replica decision: recent demand, and owner of the replicas.

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
    idle_since: float | None = None
    """Start of the present period without requests, where minReplicas is 0."""


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


# Stored drift of a deployment's draft: baseline and detector of each task, as the section `drift` has them. Pure.

ALL_TASKS = ""
"""``task`` of the record of all tasks together, by which a changed mix shows."""


class TaskDrift(Stored):
    """Baseline and detector of one task."""

    task: str
    requests: float = 0.0
    """Finished requests of the batch that is being collected."""
    batch: ChainCounts = ChainCounts()
    """Counts of that batch."""
    known: ChainCounts = ChainCounts()
    """Counts of all batches of the baseline, for the ratios of the depths."""
    learning: LearningBaseline | None = None
    """Baseline that is being learnt. None before the first batch, and once it is frozen."""
    baseline: Baseline | None = None
    """The frozen baseline. None while it is learnt."""
    detector: DriftDetector | None = None
    """Evidence that the task is slower than its baseline; None without any. It stays as it is while the drift lasts."""
    ending: DriftDetector | None = None
    """Evidence that the task is as fast as its baseline again, since the drift began."""
    recent: float = 0.0
    """Decayed sum of log cost above the baseline, of the last batches."""
    recent_weight: float = 0.0
    threshold: float = 0.0
    """Evidence at which the alarm is raised: batches between two false ones."""
    since: float = 0.0
    """Time when the drift was found, in seconds since the epoch; 0 without one."""
    steps: float = 0.0
    """Decayed number of decoding steps of the task's sequences."""

    @property
    def excess(self) -> float:
        """Mean log cost above the baseline over the last batches."""
        return self.recent / self.recent_weight if self.recent_weight else 0.0

    @property
    def loss(self) -> float:
        """Share of the speed that is lost against the baseline; negative where the task is faster."""
        return -math.expm1(-self.excess)

    @property
    def evidence(self) -> float:
        """Evidence of the detector over its threshold; 1 raises the alarm."""
        if self.detector is None or self.threshold <= 0:
            return 0.0
        return math.exp(min(50.0, self.detector.log_evidence - math.log(self.threshold)))

    def tokens(self, at: float) -> tuple[float, float]:
        """Return the tokens per step of a chain of three: of the baseline at this time of the day, and now."""
        expected = self.baseline.expected(at) if self.baseline else 0.0
        return math.exp(-expected), math.exp(-expected - self.excess)


class DriftState(Stored):
    """Drift of one draft on one target in one image."""

    draft: str = ""
    target: str = ""
    image: str = ""
    renewed: str = ""
    """Change that began a new baseline; empty for the first one."""
    tasks: tuple[TaskDrift, ...] = Field(default=(), max_length=32)
    decode_seconds: float = 0.0
    """Decayed sum of the seconds of decoding steps, all workers together."""
    decode_days: float = 0.0
    """Decayed days in which they were counted."""
    at: float = 0.0
    """Time of the last measurement."""

    def task(self, name: str) -> TaskDrift:
        """Return the record of a task; a new one if there is none."""
        return next((task for task in self.tasks if task.task == name), TaskDrift(task=name))

    @property
    def own_tasks(self) -> tuple[TaskDrift, ...]:
        """Records of single tasks."""
        return tuple(task for task in self.tasks if task.task != ALL_TASKS)

    @property
    def watched(self) -> tuple[TaskDrift, ...]:
        """Tasks with a baseline."""
        return tuple(task for task in self.own_tasks if task.baseline is not None)

    @property
    def stale(self) -> tuple[TaskDrift, ...]:
        """Tasks that became slower."""
        return tuple(task for task in self.own_tasks if task.since)

    @property
    def mix(self) -> TaskDrift | None:
        """Record of all tasks together if they became slower and no task did."""
        return None if self.stale else next((one for one in self.tasks if one.task == ALL_TASKS and one.since), None)


# The whole state, and its text.

FORMAT = 1
STATE_KEY = "state"
"""Entry of the ConfigMap: JSON, compressed by zlib, in base64."""
PLAN_KEY = "plan.json"
"""Entry of the ConfigMap that workers mount."""
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
    plan: Plan | None = Field(default=None, exclude=True)
    """The published plan, stored only in the ConfigMap that workers mount. Its version never falls."""
    rows: tuple[RowState, ...] = ()
    swept_at: float = 0
    """Time when the rows of all loads were last chosen."""
    acceptance: tuple[AcceptanceCell, ...] = ()
    contexts: tuple[ContextCell, ...] = ()
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
    pods: tuple[PodState, ...] = ()
    recycled_at: float | None = None
    """Time when a pod was last replaced because of its acceptance."""
    recycling: str = ""
    """Uid of the pod that is to be evicted for its acceptance, until its eviction is observed."""
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


def plan_of(data: Mapping[str, str], uid: str) -> Plan | None:
    """Return the plan in the data of a ConfigMap ``<name>-plan``; None if it is unreadable or of another deployment."""
    try:
        plan = Plan.model_validate_json(data.get(PLAN_KEY, ""))
    except ValueError:
        return None
    return plan if plan.uid == uid else None


def parse_state(data: Mapping[str, str], uid: str, plan: Plan | None = None) -> LearnedState | None:
    """Return the state that ``render_state`` wrote, with its plan. None if it is absent or of another deployment.

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
    return learned.model_copy(update={"plan": plan}) if learned.uid == uid else None


# Estimates of drafts, parked and restored in the learned state. Pure.
#
# Estimates belong to a draft. When the current draft changes, those of the old draft are parked, and those of the new
# draft are restored if they are known, so that a rollback or a canary loses nothing.


def with_parked(learned: LearnedState, estimates: DraftEstimates) -> LearnedState:
    """Return ``learned`` with these estimates as those of the most recently used parked draft."""
    others = (parked for parked in learned.parked if parked.draft != estimates.draft)
    return learned.model_copy(update={"parked": (estimates, *others)[:MAX_PARKED_DRAFTS]})


def parked_of(learned: LearnedState, draft: str) -> DraftEstimates:
    """Return the parked estimates of a draft; empty ones if there are none."""
    return next((parked for parked in learned.parked if parked.draft == draft), DraftEstimates(draft=draft))


def with_draft(learned: LearnedState, draft: str) -> LearnedState:
    """Return ``learned`` with ``draft`` as the current draft: restored if it is parked, else from nothing.

    Step times without draft passes stay. After a pause, tests for change points and hourly limits begin again.
    """
    new, learned = parked_of(learned, draft), _with_old_parked(learned)
    return _with_current(learned, draft, new.rows, new)


def with_promoted_draft(learned: LearnedState, draft: str) -> LearnedState:
    """Return ``learned`` with ``draft`` as the current draft, which takes over what was learnt with the old one.

    Rows and step times move to the new hash, because both drafts have the same shapes. What was measured with the new
    draft itself goes before. A draft that had rows of its own, such as after a rollback, gets these back.
    """
    new = parked_of(learned, draft)
    if new.rows:
        return with_draft(learned, draft)
    costs = {CellKey.of(cell): cell for cell in (*learned.costs, *new.costs)}
    taken = DraftEstimates(
        draft=draft,
        acceptance=new.acceptance or learned.acceptance,
        contexts=new.contexts if new.acceptance else learned.contexts,
        requests=new.requests or learned.requests,
        costs=tuple(cell for cell in costs.values() if cell.draft_passes),
    )
    return _with_current(_with_old_parked(learned), draft, learned.rows, taken)


def _with_old_parked(learned: LearnedState) -> LearnedState:
    again = {"changed_at": 0.0}
    old = DraftEstimates(
        draft=learned.draft,
        acceptance=tuple(c.model_copy(update={**again, "new_hits": 0.0, "new_total": 0.0}) for c in learned.acceptance),
        contexts=tuple(c.model_copy(update={**again, "new_hits": 0.0, "new_total": 0.0}) for c in learned.contexts),
        requests=learned.requests,
        costs=tuple(c.model_copy(update={**again, "new_values": ()}) for c in learned.costs if c.draft_passes),
        rows=tuple(row.model_copy(update={"moves": ()}) for row in learned.rows),
    )
    if old.draft and (old.acceptance or old.requests or old.costs or old.rows):
        return with_parked(learned, old)
    return learned


def _with_current(learned: LearnedState, draft: str, rows: tuple[RowState, ...], new: DraftEstimates) -> LearnedState:
    plain: tuple[StepTimeCell, ...] = tuple(cell for cell in learned.costs if not cell.draft_passes)
    return learned.model_copy(
        update={
            "draft": draft,
            "rows": rows,
            "acceptance": new.acceptance,
            "contexts": new.contexts,
            "requests": new.requests,
            "costs": tuple(sorted((*plain, *new.costs), key=CellKey.of)),
            "parked": tuple(parked for parked in learned.parked if parked.draft != draft),
        }
    )


# Records of the rollout of a deployment's drafts, and of its training runs. Pure.
#
# What concerns one draft is stored in its SpecDecodeDraft and nowhere else. What concerns
# training runs, and the pause after a rollout, is the entry ``training`` of the ConfigMap ``<name>-state``. If that is
# lost, so is a run that was under way, and no draft.

LINEAGE = 10
"""Number of candidates in the lineage."""
TRAINING_KEY = "training"
"""Entry of the ConfigMap."""


class RunRecord(Stored):
    """Training run that is under way."""

    id: str
    """Time of its beginning in hexadecimal digits. It names the Job and the run's folder, so it is never used twice."""
    started: float
    reason: str = ""
    draft_uri: str = ""
    """Draft that the run goes on from."""
    claim: str = ""
    """Claim with the run's folder and the new draft; empty with a bucket."""
    bucket: str = ""
    """URI below which new drafts lie in a bucket; empty with a claim."""
    endpoint: str = ""
    """URL of the bucket's store; empty for that of AWS."""
    loss: float = 0.0
    """Share of decode device time that a stale draft costs; 0 if the run has another reason."""
    job_uid: str = ""
    """Uid of the Job once it was seen. With a uid and without that Job, the Job is lost."""
    losses: int = 0
    """Jobs that were lost."""
    retry_at: float = 0.0
    """Time before which no Job is created."""

    @property
    def place(self) -> str:
        """URI below which new drafts lie."""
        return self.bucket or f"pvc://{self.claim}"


class TrainingRecord(Stored):
    """Part of a rollout that is stored in the ConfigMap: training runs, and the settings at its start."""

    phase: Phase = Phase.SERVING
    since: float = 0
    """Time when the phase began, or when a candidate that waits for a user was confirmed; in seconds of the epoch."""
    mode: Mode = Mode.CANARY
    spec_draft: str = ""
    """URI of the spec's draft when a candidate was last offered; empty before the first one."""
    method: str = ""
    """Method of that draft."""
    spec_hash: str = ""
    """Hash of that draft."""
    target: str = ""
    image: str = ""
    request: str = ""
    """Value of distillation.trigger.request that was carried out last."""
    last_verdict: str = ""
    refusal: str = ""
    """Reason why the latest candidate was not tried or could not be loaded; empty if there is none."""
    captures_deleted_before: float = 0
    """Time before which captured requests are deleted, in seconds of the epoch."""
    run_refusal: str = ""
    """Reason why the latest request to train was refused; empty if it was not."""
    run_device_seconds: float = 0.0
    """Device seconds of the latest run with a verdict; 0 before the first one."""
    recovery: float | None = None
    """Share of the loss that the latest better draft recovers, by its verdict. None before the first one."""
    candidate_outcomes: dict[str, int] = Field(default={})
    """Candidates that ended, by outcome."""
    run_outcomes: dict[str, int] = Field(default={})
    """Runs that ended, by outcome."""
    runs_not_better: int = 0
    """Verdicts in a row that were not better."""
    run: RunRecord | None = None
    undeleted_run: RunRecord | None = None
    """Run that ended without a verdict, so that its folder may hold captured text. ``retry_at`` is the time before
    which no Job deletes it, ``losses`` the number of such Jobs that failed, and ``reason`` that of the latest one."""
    last_run: DraftRunEndStatus | None = None


class DraftRecord(TrainingRecord):
    """The rollout of one deployment: its training runs, and the drafts that SpecDecodeDrafts stand for, by hash."""

    current: str = ""
    """Hash of the assigned draft; empty for that of the spec."""
    candidate: str = ""
    previous: str | None = None
    is_confirmed: bool = False
    canary_losses: int = 0
    uris: dict[str, str] = Field(default={})
    """URIs of the candidate, the current and the previous draft, by hash."""
    trial: TrialRecord | None = None
    lineage: tuple[DraftLineageStatus, ...] = ()

    def with_ended(self, entry: DraftLineageStatus) -> DraftRecord:
        """Return the record with the end of a candidate."""
        counts = self.candidate_outcomes
        counted = {**counts, entry.outcome: counts.get(entry.outcome, 0) + 1}
        others = (one for one in self.lineage if one.hash != entry.hash)
        return self.model_copy(update={"lineage": (entry, *others)[:LINEAGE], "candidate_outcomes": counted})

    @property
    def is_used(self) -> bool:
        """True once a candidate was taken up or a run was requested. Before, no draft is assigned."""
        return bool(self.spec_draft)

    @property
    def planned_draft(self) -> str:
        """Hash of the draft that the plan is for; empty where the majority of the reports decides."""
        is_open = self.phase in (Phase.CANARY, Phase.PROMOTING, Phase.ROLLING_BACK)
        return self.current or (self.spec_hash if is_open else "")


UNUSED = DraftRecord()


def render_training(record: DraftRecord) -> dict[str, str]:
    """Return the entry of the ConfigMap; none where no draft was ever offered or trained."""
    training = TrainingRecord(**{name: getattr(record, name) for name in TrainingRecord.model_fields})
    text = training.model_dump_json(by_alias=True, exclude_defaults=True)
    return {TRAINING_KEY: text} if text != "{}" else {}


def parse_training(data: Mapping[str, str]) -> DraftRecord:
    """Return the record that ``render_training`` wrote, without drafts.

    Raises:
        ValueError: The entry cannot be read.
    """
    return DraftRecord.model_validate_json(data[TRAINING_KEY]) if TRAINING_KEY in data else UNUSED


# Session of one deployment: its learned state, and recent measurements that a restart may lose. Pure.

WINDOW_SECONDS = 60.0
"""Length of the window of measurements, in seconds. The figures in status cover this window."""


@dataclass(frozen=True, slots=True)
class LastReport:
    """Last report of one worker, with which the next one is compared. It is compressed, because there are thousands."""

    packed: bytes
    """Compressed JSON of the report."""
    clock_seconds: float
    """Worker's clock at the report; it replaces that of the packed one."""
    tag: str = ""
    """ETag of the response; empty if the worker sent none."""

    @classmethod
    def of(cls, report: Report, tag: str = "") -> LastReport:
        baseline = cls(zlib.compress(report.model_dump_json().encode(), 3), report.clock_seconds, tag)
        _reports.put(baseline.packed, report)
        return baseline

    @property
    def report(self) -> Report:
        """The report, with the time of ``clock_seconds``."""
        report = _reports.get(self.packed)
        if report.clock_seconds == self.clock_seconds:
            return report
        return report.model_copy(update={"clock_seconds": self.clock_seconds})

    def at(self, clock_seconds: float) -> LastReport:
        """Return the same report at a later time of the worker's clock."""
        return replace(self, clock_seconds=clock_seconds)


class _ReportCache:
    """The reports that were read last, unpacked: between a poll and its decision and status each is read several times.

    A report takes some 150 KiB when it is unpacked, so there are few.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._reports: OrderedDict[bytes, Report] = OrderedDict()

    def get(self, packed: bytes) -> Report:
        report = self._reports.get(packed)
        if report is None:
            report = Report.model_validate_json(zlib.decompress(packed))
        self.put(packed, report)
        return report

    def put(self, packed: bytes, report: Report) -> None:
        self._reports[packed] = report
        self._reports.move_to_end(packed)
        while len(self._reports) > self._size:
            self._reports.popitem(last=False)


_reports = _ReportCache(size=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Period in which a ready worker sends no report."""

    since: float
    """Start, in seconds of the operator's clock."""
    looks: int
    """Consecutive rounds without a report."""
    problem: str
    """Problem of the first of these rounds. It is not updated, so that status stays the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Learned state of one deployment, and its recent measurements."""

    learned: LearnedState = field(default_factory=LearnedState)
    baselines: Mapping[str, LastReport] = field(default_factory=dict)
    """Last report of each worker, by uid of the pod."""
    window: tuple[Delta, ...] = ()
    """Differences between reports, summed over all workers, of the last WINDOW_SECONDS; oldest first."""
    round: int = 0
    """Number of the last telemetry round that was counted."""
    silent: Mapping[str, Silence] = field(default_factory=dict)
    """Ready workers without a report, by uid of the pod."""
    published_at: float = 0
    """Time when figures were last published to status, in seconds of the operator's clock."""
    drafts: DraftRecord = UNUSED
    """Rollout of drafts, which survives a restart as ``learned`` does."""
    stored: bool = True
    """False if no state was stored: the deployment is new, or the ConfigMap of its state was deleted or unreadable."""
