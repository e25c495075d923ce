"""Records that pass between the steps observe, decide, apply and status. Data only, with a few derived properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import SecretKeyRef, Spec, Status
from specdecode_operator.drafts.job_status import JobStatus
from specdecode_operator.state.learned import LastReport, Session
from specdecode_worker.contract import CheckVerdict, Plan, Port, Report, TreeShape
from specdecode_worker.contract.demand import HeldRequests
from specdecode_worker.contract.wire import MAX_PREFILL_WORKERS

# Records of what was measured: figures for status, capacity, and workers that differ from their peers. Data only.


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Accepted tokens per drafted token, and tokens per step of a sequence with a draft, over all workers."""

    acceptance_rate: float
    accepted_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigures:
    """Measurements of one task over the window. A value is None while the task had too little traffic for it."""

    acceptance_rate: float | None = None
    """Accepted tokens per draft over the depth of the task's row."""
    accepted_length: float | None = None
    """Tokens per step of a sequence with a draft: 1 + accepted / drafts."""
    ttft_seconds: float | None = None
    """Mean time to the first token."""
    itl_seconds: float | None = None
    """Mean inter-token latency."""
    speedup: float | None = None
    """Time of plain decoding for the task's tokens, divided by the time taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements over the window of the last minute. Status shows them at most every half minute, to limit writes."""

    running: float
    waiting: float
    tokens_per_second: float
    synthetic: bool
    """True if a worker has synthetic knobs on, so that its figures are not those of real traffic."""
    speed: Speed | None = None
    """None while too few drafts were verified."""
    speedup: float | None = None
    """Time of plain decoding divided by the time taken, over all steps. None while plain step times are unknown."""
    tasks: Mapping[str, TaskFigures] = field(default_factory=dict)
    saved_device_seconds: float | None = None
    """Running total of LearnedState.saved_device_seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Load that one worker can carry with the present mix of requests and the shapes that would be chosen for it."""

    rate: float
    """Requests per second."""
    sequences: float
    """Mean number of sequences that run at this rate."""
    step_seconds: float
    limited_by: Literal["slots", "itl", "ttft", "cache"]
    """First limit that a higher rate would exceed: slots for sequences, an objective (ITL, TTFT), or the KV cache."""
    attainable: bool = True
    """False if a single sequence misses an objective; then more workers do not help."""


class StepEstimate(NamedTuple):
    """One step of a number of sequences of a worker, with the best shapes for that number."""

    seconds: float
    tokens: float
    """Expected tokens per sequence, mean over the tasks."""
    least_tokens: float
    """Expected tokens per sequence of the task with the fewest."""
    error: float
    """Standard error of log(seconds / tokens)."""


StepModel = Callable[[float, float], StepEstimate]
"""Step of so many sequences, which also reads so many prompt tokens on average."""


@dataclass(frozen=True, slots=True)
class ScalingLimit:
    """Reason why the replicas do not follow demand."""

    reason: Literal["Unschedulable", "AtMaximum", "ObjectiveOutOfReach"]
    message: str


@dataclass(frozen=True, slots=True)
class UnhealthyWorker:
    """Pod whose acceptance fell far below its peers and its own past, or whose steps take longer than theirs."""

    pod: str
    reason: Literal["AcceptanceCollapsed", "SlowSteps"]
    message: str


# Records that pass between the steps observe, decide, apply and status. Data only, with a few derived properties.

Manifest = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name of a deployment."""


DEFAULT_MODEL_CACHE: dict[str, Any] = {"emptyDir": {"sizeLimit": "64Gi"}}
"""Volume of downloaded models where neither spec nor settings have one: models of 30B in 16 bits fit, and no disk of a
node is filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPeers:
    """Peers of a deployment's pods, as in a NetworkPolicy."""

    clients: tuple[dict[str, Any], ...] = ()
    """Peers that may use the public port; anyone when empty."""
    admins: tuple[dict[str, Any], ...] = ()
    """Peers, besides routers and training Jobs, that may use the admin port: the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values from the operator's settings for fields that a spec leaves out."""

    worker_image: str
    worker_image_pull_policy: str
    router_image: str = "localhost/specdecode-operator:dev"
    router_image_pull_policy: str = "IfNotPresent"
    worker_template: Manifest = field(default_factory=dict)
    """Pod template of workers and training Jobs, beneath that of the spec."""
    router_template: Manifest = field(default_factory=dict)
    model_cache: Manifest = field(default_factory=lambda: DEFAULT_MODEL_CACHE)
    """Source of the volume of downloaded models."""
    hub_token: SecretKeyRef | None = None
    """Secret with the hub's token, which need not exist."""
    policy_peers: PolicyPeers | None = None
    """Peers that the NetworkPolicy of a deployment admits. None: there is no policy."""
    fixed_user: bool = True
    """Whether pods name their user and groups. Where the namespace assigns them, as on OpenShift, they must not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One SpecDecodeDeployment, parsed from the API server's object."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    status: Status

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The child Deployment of Kubernetes that runs the workers, parsed from the API server's object."""

    generation: int
    observed_generation: int
    wanted: int
    replicas: int
    updated: int
    ready: int
    available: int
    stalled: str | None = None
    """Message of the condition Progressing if it is False: the rollout exceeded its deadline."""
    replica_failure: str | None = None
    """Message of the condition ReplicaFailure: pods cannot be created, for a quota or an admission rule."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Pod template; empty if the workload comes from an informer cache."""
    spec_hash: str = ""
    """Hash of the rolling part of the spec from which the template was made."""

    @property
    def settled(self) -> bool:
        """True if no rollout and no change of the replicas is under way."""
        is_observed = self.observed_generation >= self.generation
        return is_observed and self.updated == self.replicas == self.wanted == self.available


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker pod, with its latest report or the reason why there is none."""

    name: str
    uid: str
    address: str | None
    ready: bool
    role: str = "worker"
    """Value of the pod's label specdecode.io/role."""
    leaving: bool = False
    """True if the pod is being deleted or has ended."""
    placed: bool = True
    """True if the pod is scheduled to a node."""
    created_at: float | None = None
    """Creation time of the pod, in seconds since the epoch."""
    trouble: str | None = None
    """Message of the kubelet or the scheduler that says why the pod does not start."""
    verdict: CheckVerdict | None = None
    """Result of the worker's check before loading, read from the termination message. None once the worker is ready."""
    report: Report | None = None
    baseline: LastReport | None = None
    """The report as it is stored for the next comparison. None where the report was not polled."""
    report_problem: str | None = None
    pull_seconds: float | None = None
    """Seconds that the init container took to fetch the models. None while it runs."""
    revisions: Mapping[str, str] = field(default_factory=dict)
    """Commits of the pod's models whose URI names none, by URI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A Job that trains a draft, with its state."""

    name: str
    uid: str
    run: str
    """Run that it belongs to, by its label."""
    owner_uid: str
    """Uid of the controlling owner; empty without one."""
    deleting: bool
    status: JobStatus
    waiting_pod: str = ""
    """Uid of its pod if that is on a node and starts no container, for a reason that its status does not have."""
    waiting_since: float = 0.0
    """Creation time of that pod, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Workload, workers and session of one deployment at one moment: the input of a decision."""

    workload: Workload | None
    workers: tuple[Worker, ...]
    session: Session
    round: int = 0
    """Number of the telemetry round that the reports are from. With 0, each observation counts as a round."""
    routers: Workload | None = None
    """The Deployment of the routers. None if there is none."""
    prefill_workload: Workload | None = None
    """The Deployment of the prefill workers. None if there is none."""
    prefill: tuple[Worker, ...] = ()
    """Pods of prefill workers."""
    demand: Mapping[str, HeldRequests] = field(default_factory=dict)
    """Requests that routers hold because no worker is ready, by router."""
    drafts: tuple[SpecDecodeDraft, ...] = ()
    """SpecDecodeDrafts of the deployment, in the order of their names."""
    jobs: tuple[TrainingJob, ...] = ()
    """Jobs with the deployment's name in their label, whoever owns them."""
    jobs_problem: str = ""
    """Reason why Jobs cannot be listed, as without the right; ``jobs`` are then out of date or missing."""

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        """Addresses from which workers can ask for the blocks of prompts, in order; as many as a plan may name."""
        ready = (one.address for one in self.prefill if one.ready and not one.leaving and one.address)
        named = sorted(f"[{host}]:{Port.blocks}" if ":" in host else f"{host}:{Port.blocks}" for host in ready)
        return tuple(named[:MAX_PREFILL_WORKERS])

    @property
    def reports(self) -> tuple[Report, ...]:
        """Reports of this round, of all workers that are not leaving."""
        return tuple(worker.report for worker in self.workers if worker.report and not worker.leaving)

    @property
    def refusals(self) -> tuple[CheckVerdict, ...]:
        """Verdicts of workers that cannot serve: the model or a required draft does not fit."""
        verdicts = (worker.verdict for worker in self.workers if not worker.leaving)
        return tuple(verdict for verdict in verdicts if verdict and not verdict.serves)

    @property
    def last_reports(self) -> tuple[Report, ...]:
        """Latest known report of each worker that is not leaving: from this round, or else from an earlier one."""
        reports = (worker.report or self._last(worker) for worker in self.workers if not worker.leaving)
        return tuple(report for report in reports if report)

    def _last(self, worker: Worker) -> Report | None:
        return known.report if (known := self.session.baselines.get(worker.uid)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """Number of workers, and the figures behind it."""

    replicas: int
    """Replicas to set."""
    desired: int
    """Replicas that demand asks for, within the bounds; they differ from ``replicas`` with an external owner."""
    wanted: int | None = None
    """Workers that demand asks for, without bounds. None without spec.scaling."""
    arrivals: float | None = None
    """Requests per second of the whole deployment over the last minute. None while they are unknown."""
    capacity: Capacity | None = None
    limited: ScalingLimit | None = None
    reason: str = ""
    """Reason for a change, as the decision history shows it."""
    prefill: int = 0
    """Number of prefill workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remediation:
    """Actions on unhealthy workers, and the state for the next decision."""

    unhealthy: tuple[UnhealthyWorker, ...] = ()
    own: frozenset[str] = frozenset()
    """Addresses of the workers that must not run the common plan."""
    own_plans: dict[str, Plan] = field(default_factory=dict)
    """Plans of those workers by address, as far as they do not run them yet."""
    recycle: tuple[str, ...] = ()
    """Names of the pods to evict."""
    recycling: str = ""
    """Uid of the pod that was proposed last, to be stored until its eviction is observed."""
    recycled_at: float | None = None
    """Time of the latest replacement, to be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Values for status, Events and metrics alone."""

    image: str
    url: str
    selector: str
    """Label selector of the pods, as text for the scale subresource."""
    recommended: str | None = None
    """Shape that mode Auto would run at the present load, in Advisory mode and while Auto is overridden by a pin."""
    depth: int | None = None
    """Draft depth at the present load. None while no worker reports that it runs the plan."""
    suspended: TreeShape | None = None
    """Shape of the plan at the present load that the guards of all workers suspend. None if they suspend none."""
    task_depths: Mapping[str, int] = field(default_factory=dict)
    """Draft depth of each task of the spec at the present load."""
    merges: Mapping[str, str] | None = None
    """Sentence about the merged drafts of each task that declares some. None if they are not due for publication."""
    figures: Figures | None = None
    """Measurements for status; None if they are not due for publication."""
    first_acceptance: float | None = None
    """Acceptance rate of the first drafted token. It does not depend on the depth in use."""
    drafting_share: float | None = None
    """Share of a step at the present load that draft passes surely take. None where it is unknown."""
    context_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Acceptance of the first draft token by task and context, of tasks that were seen in several contexts."""
    history: tuple[DecisionRecord, ...] = ()
    """Decisions in the stored history, newest first, with their realised gains."""
    measuring: str | None = None
    """Lack of the estimates while rows wait for reliable ones. None once they are, and where no rows are planned."""
    pinned: str = ""
    """Pin in force, as text; empty without a pin."""
    model_revision: str | None = None
    """Commit of the target that new pods fetch, if its URI names none and it was resolved."""
    pin_problem: str | None = None
    """Reason why a pin is invalid. The previous pin or mode stays in force."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Names of ready workers whose reports are stale, each with the first reason."""
    nodes: int | None = None
    """Draft tokens of the shape in use at the present load; 0 for plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Desired state of one deployment: what is carried out, and how much, how well, and what is shown."""

    plan: Plan
    """Plan of all workers that are not in ``excluded``."""
    children: tuple[Manifest, ...]
    """Manifests in the order in which they are applied: the plan comes before the pods that mount it."""
    scale: ReplicaDecision
    health: Remediation
    shown: Shown
    pushes: tuple[str, ...] = ()
    """Addresses of workers that must be given ``plan``."""
    job: Manifest | None = None
    """Training Job to create. None if none is due, or it exists."""
    ended_jobs: tuple[TrainingJob, ...] = ()
    """Training Jobs to delete, because no run needs them."""
    changes: tuple[DecisionRecord, ...] = ()
    """Decisions made just now, oldest first; each becomes an Event."""
    urgent: bool = False
    """The learned state holds a new decision, which must be persisted before it takes effect."""
    learnt: bool = False
    """Something was measured since the last decision. The learned state is written when a write is due."""


@dataclass(frozen=True, slots=True)
class ChildProblem:
    """A child object that could not be made equal to the desired one."""

    kind: str
    name: str
    reason: Literal["NotOwned", "Refused", "Unavailable"]
    """NotOwned: the object belongs to another controller or user. Refused: the API server rejected the request; it is
    repeated with back-off. Unavailable: the API server or a webhook did not answer."""
    message: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of applying the desired children."""

    problems: tuple[ChildProblem, ...] = ()
    job_problem: str = ""
    """Reason why the training Job could not be created; empty if there is none."""
