"""State that the operator writes: ``status``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from specdecode_operator.api.schema import Api, Text, named_list

# Drafts of a deployment, as ``status.draft`` shows them.

Outcome = Literal["Promoted", "RolledBack", "Rejected", "Undecided", "Refused", "Failed", "Expired", "Superseded"]
"""End of a candidate's trial or promotion."""
RunOutcome = Literal["Better", "NotBetter", "Failed", "Poisoned", "Expired", "Rejected", "Superseded"]
"""End of a training run."""


class DraftVersionStatus(Api):
    """One draft by its content."""

    hash: Text | None = None
    """Hash of the draft's files. Absent: not reported yet."""
    uri: Text | None = None
    """Where the draft comes from."""


class DraftLineageStatus(Api):
    """A candidate that was tried, and its end."""

    hash: Text
    """Hash of the candidate."""
    uri: Text | None = None
    """Where it came from."""
    time: Text
    """Time of the end."""
    outcome: Outcome
    """Promoted; RolledBack: it was slower, or a promotion was taken back; Rejected: by a user; Undecided: too little
    evidence; Refused: a worker could not load it; Failed: its worker was lost too often; Expired: time was over;
    Superseded: draft, target or image changed."""
    pairs: int = 0
    """Pairs of request blocks that were counted."""
    gain_percent: float | None = None
    """Mean gain in speed of these pairs, in percent."""
    reason: Text = ""
    """Reason in a sentence, with numbers."""


class DraftRunStatus(Api):
    """Training run that is under way."""

    id: Text
    """Name of the run: part of the Job's name, and its folder on the claim."""
    started: Text
    """Time of its beginning."""
    reason: Text = ""
    """Reason for the run."""
    conversations: int | None = None
    """Captured conversations of all workers while the run collects, rounded down."""
    needed: int | None = None
    """Captured conversations that the run needs."""
    capture_problem: Text | None = None
    """Reason why a worker captures no requests, while the run collects."""
    job: Text | None = None
    """Name of the Job. Absent: the run collects still."""
    job_state: Text | None = None
    """State of the Job: Absent, Refused, Pending, Unschedulable, Suspended, Running, Preempted, Retrying, Failed,
    OutOfMemory, DeadlineExceeded or Finished."""
    job_reason: Text | None = None
    """Reason for that state, in the words of the scheduler, the queue or the kernel."""
    losses: int = 0
    """Times that the Job vanished and was created again."""


class DraftRunEndStatus(Api):
    """Training run that ended."""

    id: Text
    """Name of the run."""
    time: Text
    """Time of its end."""
    outcome: RunOutcome
    """Better: its draft became a candidate; NotBetter: no gain was shown; Failed; Poisoned: too much captured text is
    not the target's own; Expired: time was over; Rejected: by a user; Superseded: draft or target changed."""
    hash: Text | None = None
    """Hash of its draft. Absent: there is none."""
    gain_percent: float | None = None
    """Gain in tokens per second over the draft before, on the captured mix, in percent."""
    least_gain_percent: float | None = None
    """Lower bound of the gain, in percent."""
    most_gain_percent: float | None = None
    """Upper bound, likewise."""
    conversations: int = 0
    """Captured conversations that were used."""
    device_seconds: float = 0
    """Device seconds of the run."""
    reason: Text = ""
    """Reason in a sentence."""


class DraftStatus(Api):
    """Draft that the workers run, and the rollout of another one."""

    hash: Text | None = None
    """Hash of the draft's weights."""
    uri: Text | None = None
    """URI of the draft."""
    current: DraftVersionStatus | None = None
    """Draft that is assigned to the workers. Absent until a candidate was offered."""
    candidate: DraftVersionStatus | None = None
    """Draft that is tried or promoted now."""
    previous: DraftVersionStatus | None = None
    """Draft to which a rollback returns."""
    phase: Text | None = None
    """Phase: Serving, Collecting, Distilling, Canary, Promoting, RollingBack or Cooldown. Absent until a candidate was
    offered or a run was requested."""
    run: DraftRunStatus | None = None
    """Training run that is under way."""
    last_run: DraftRunEndStatus | None = None
    """Latest training run that ended."""
    last_verdict: Text | None = None
    """Latest verdict or end of a rollout, in a sentence."""


# Observed state that users read: ``status``. It is written on change only, with rounded figures.

MAX_MESSAGE = 4096
"""Maximum characters of the message of a condition or the reason of a decision."""
_Message = Annotated[str, Field(max_length=MAX_MESSAGE)]


class ConditionType(StrEnum):
    """Types of conditions, after kstatus.

    Reconciling and Stalled exist only while True, conditions of a feature only while it is in use, the others always.

    | type | True means |
    |---|---|
    | Ready | the generation is observed, the rollout is finished, and all wanted workers serve (kstatus: Current) |
    | Available | at least one worker serves requests, whatever generation it is of |
    | Progressing | a rollout or a change of the number of workers is under way |
    | Reconciling | the operator has not yet made the children equal to the spec (kstatus: InProgress) |
    | Stalled | the children will not become equal to the spec without a change by a person (kstatus: Failed) |
    | MemoryFits | the model fits the memory of the device |
    | DraftCompatible | the draft fits the target |
    | DraftFresh | no task became slower than its baseline; only while a draft is used |
    | DraftRollout | a candidate draft is tried, promoted or rolled back; only once one was offered |
    | SpeculationEffective | speculation is measured faster than plain decoding |
    | ScalingLimited | the number of workers cannot follow the demand |
    | ReportsFresh | all ready workers send reports |
    | RoutersReady | all wanted routers serve; only while spec.router.replicas is above 0 |
    | WorkersHealthy | no worker differs from its past and its peers |
    | Pinned | a shape is pinned |
    """

    ready = "Ready"
    available = "Available"
    progressing = "Progressing"
    reconciling = "Reconciling"
    stalled = "Stalled"
    memory_fits = "MemoryFits"
    draft_compatible = "DraftCompatible"
    draft_fresh = "DraftFresh"
    draft_rollout = "DraftRollout"
    speculation_effective = "SpeculationEffective"
    scaling_limited = "ScalingLimited"
    reports_fresh = "ReportsFresh"
    routers_ready = "RoutersReady"
    workers_healthy = "WorkersHealthy"
    pinned = "Pinned"


class Condition(Api):
    """Condition as in metav1.Condition."""

    type: Text
    """Type of the condition, such as Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Text
    """Reason in one CamelCase word."""
    message: _Message = ""
    """Sentence with the details, and with names of objects."""
    last_transition_time: Text
    """Time of the last change of status."""
    observed_generation: int = 0
    """Generation of the spec that the condition is about."""


Cause = Literal[
    "bounds",
    "loses",
    "gain",
    "trial",
    "probe",
    "up",
    "down",
    "mode",
    "pin",
    "canary",
    "user",
    "failure",
    "run",
    "drift",
    "mix",
    "over",
]
"""Cause of a decision: bounds of the spec; speculation that loses; a measured gain; a trial of an unmeasured shape; a
probe after speculation was stopped; rising or falling demand; a changed mode; a changed pin; the canary of a draft; a
user's change or command about drafts; a draft that could not be loaded, a lost pod or the end of its time; a training
run; a draft that became slower; a changed mix of tasks; the end of either."""


class Decision(Api):
    """Decision of the operator: its measurements, the change, its reason, and later its realised gain."""

    time: Text
    """Time of the decision."""
    kind: Literal["Plan", "Replicas", "Steering", "Draft", "Drift"] = "Plan"
    """Plan: rows of the plan changed. Replicas: the number of workers changed. Steering: a user changed the mode or the
    pin. Draft: the rollout of a draft entered another phase. Drift: a draft became slower than its baseline, or the
    drift is over."""
    load: Text
    """Changed part: concurrency, context and task of a row; or replicas; or every load."""
    before: Text
    """Value before the decision."""
    after: Text
    """Value after the decision."""
    measured: Text | None = None
    """Measurements that the decision is based on."""
    expected_gain_percent: float | None = None
    """Expected gain in tokens per second, in percent."""
    realised_gain_percent: float | None = None
    """Measured gain in tokens per second, in percent: the first 500 drafts after the change against the shape before
    it, at equal numbers of sequences. Absent until then. Of a draft: the mean of its trial."""
    cause: Cause | None = None
    """Cause in one word, as the operator's metrics count it."""
    reason: _Message
    """Reason of the decision, in a sentence."""


class SpeculationStatus(Api):
    """Speculation at the present load. Figures are of all workers together."""

    depth: int | None = None
    """Draft depth of the row in use at the present load."""
    nodes: int | None = None
    """Draft tokens of the shape of that row."""
    acceptance_rate: float | None = None
    """Accepted tokens over drafted tokens."""
    accepted_length: float | None = None
    """Tokens per step: 1 + accepted tokens / drafts."""
    acceptance_by_context: _Message | None = None
    """Acceptance of the first draft token by the longest context of a step, in tokens, of tasks seen in several
    contexts."""
    speedup: float | None = None
    """Time of plain decoding over the time taken."""
    measured_at: Text | None = None
    """Time of the last change of the three figures above."""
    device_hours_saved: float | None = None
    """Device hours that plain decoding would have taken in addition: the sum of (speedup - 1) x device hours of
    decoding."""
    plan_version: int | None = None
    """Version of the applied plan. It only rises."""
    pinned: Text | None = None
    """Pins in force, as text: chain:3, or code=chain:6,chat=none."""
    recommended: Text | None = None
    """Shape that mode Auto would run at the present load. Present in mode Advisory and while pinned."""
    history: Annotated[tuple[Decision, ...], Field(max_length=10)] = ()
    """Latest decisions, the newest first."""


class TaskStatus(Api):
    """One task of spec.speculation.tasks, at the present load. ``other`` means all requests without a task."""

    name: Text
    """Name of the task."""
    mode: Text | None = None
    """Mode in force for the task, or Pinned."""
    depth: int | None = None
    """Draft depth of the task's row."""
    merge: _Message | None = None
    """Merged drafts that take part, their credit, and why others are left out."""
    acceptance_rate: float | None = None
    """Accepted tokens over the depth of the row."""
    accepted_length: float | None = None
    """Tokens per step: 1 + accepted tokens / drafts."""
    ttft_milliseconds: float | None = None
    """Mean time to the first token of the last minute, in milliseconds."""
    itl_milliseconds: float | None = None
    """Mean inter-token latency of the last minute, in milliseconds."""
    speedup: float | None = None
    """Time of plain decoding over the time taken."""


class ModelStatus(Api):
    """Model that the workers serve."""

    uri: Text | None = None
    """URI of the model, as in spec.model.uri."""
    revision: Text | None = None
    """Revision of the model, for hf:// the commit. An unpinned URI is resolved once, and new pods use this revision."""


class RouterStatus(Api):
    """Routers of the deployment."""

    replicas: int = 0
    """Number of routers."""
    ready_replicas: int = 0
    """Number of routers that are ready."""
    ready: Text | None = None
    """Ready over wanted routers, for the ROUTERS column."""


class PrefillStatus(Api):
    """Prefill workers of the deployment."""

    replicas: int = 0
    """Number of prefill workers."""
    ready_replicas: int = 0
    """Number of prefill workers that are ready."""
    ready: Text | None = None
    """Ready over wanted prefill workers, for the PREFILL column."""


class MemoryStatus(Api):
    """Memory of one worker's device, computed before anything is loaded."""

    limit: Text | None = None
    """Memory of the GPU, or the container's limit on CPUs."""
    weights: Text | None = None
    """Weights of the target on each device."""
    drafts: Text | None = None
    """Weights of the drafts."""
    kv_cache: Text | None = None
    """KV cache of the target and the drafts."""
    reserve: Text | None = None
    """Memory outside of engine.memoryPercent, which is not used."""
    kv_tokens: int | None = None
    """Size of the KV cache in tokens."""


class TrafficStatus(Api):
    """Demand of the last minute, all workers together."""

    running: float | None = None
    """Running requests, on average."""
    waiting: float | None = None
    """Queued requests, on average."""
    tokens_per_second: float | None = None
    """Emitted tokens per second."""
    synthetic: bool | None = None
    """Whether synthetic knobs of tests are on in a worker."""


class CapacityStatus(Api):
    """Basis of the number of workers."""

    wanted_replicas: int | None = None
    """Workers that the demand needs, before the bounds of spec.scaling."""
    requests_per_second: float | None = None
    """Requests per second of the observed mix that one worker serves within the objectives."""
    arrivals_per_second: float | None = None
    """Measured arrivals per second, all workers together."""
    limited_by: Text | None = None
    """Limit that one worker reaches first: slots (maxNumSeqs), cache (KV cache), ttft or itl (objectives)."""


class Status(Api):
    """Observed state of the deployment."""

    observed_generation: int | None = None
    """Generation of the spec that the status is about."""
    url: Text | None = None
    """Base URL of the OpenAI API within the cluster."""
    replicas: int = 0
    """Number of workers."""
    ready_replicas: int = 0
    """Number of workers that are ready."""
    selector: Text | None = None
    """Label selector of the workers, for autoscalers."""
    ready: Text | None = None
    """Ready over wanted workers, for the READY column."""
    reason: Text | None = None
    """Reason of the condition to examine first, for the REASON column. Absent: all is well."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(max_length=16, json_schema_extra=named_list("type")),
    ] = ()
    """Conditions. Ready, Available and Progressing always; Reconciling and Stalled while True."""
    resolved_image: Text | None = None
    """Image of the workers."""
    model: ModelStatus | None = None
    """Model that the workers serve."""
    speculation: SpeculationStatus | None = None
    """Speculation at the present load."""
    tasks: Annotated[tuple[TaskStatus, ...], Field(max_length=8, json_schema_extra=named_list("name"))] = ()
    """Measurements of each task at the present load."""
    draft: DraftStatus | None = None
    """Draft that the workers run."""
    traffic: TrafficStatus | None = None
    """Demand of the last minute."""
    capacity: CapacityStatus | None = None
    """Basis of the number of workers."""
    router: RouterStatus | None = None
    """Routers. Absent: the deployment has none."""
    prefill: PrefillStatus | None = None
    """Prefill workers. Absent: the deployment has none."""
    memory: MemoryStatus | None = None
    """Memory of one worker's device."""
    start: Text | None = None
    """Seconds of each stage of a worker's start, of the newest one that is ready."""
