"""The values that pass between observe, decide, apply and status. Pure data; no behaviour beyond a property."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.state.session import Session
from specdecode_worker.contract import CheckVerdict, Plan, Report

Manifest = Mapping[str, Any]
Key = tuple[str, str]
"""Namespace and name of a deployment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the operator's settings fill in where a spec is silent."""

    worker_image: str
    worker_image_pull_policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One SpecDecodeDeployment as it was read."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    status: Status
    paused: bool = False
    pin: str = ""
    """What the annotation specdecode.io/pin says, read or not."""

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The child Deployment as it was read."""

    generation: int
    observed_generation: int
    wanted: int
    replicas: int
    updated: int
    ready: int
    available: int
    stalled: str | None = None
    """Message of a rollout that passed its deadline."""
    replica_failure: str | None = None
    """Message of the condition ReplicaFailure: pods that the ReplicaSet cannot create (quota, admission)."""
    template: Mapping[str, Any] = field(default_factory=dict)
    spec_hash: str = ""

    @property
    def settled(self) -> bool:
        """No rollout and no scaling is under way."""
        return (
            self.observed_generation >= self.generation
            and self.updated == self.replicas == self.wanted == self.available
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One pod, and its report or why there is none."""

    name: str
    uid: str
    address: str | None
    ready: bool
    leaving: bool = False
    placed: bool = True
    """The scheduler found a node for it."""
    created_at: float | None = None
    """Creation time of the pod, in seconds since the epoch."""
    trouble: str | None = None
    """What the kubelet or the scheduler says keeps it from starting."""
    verdict: CheckVerdict | None = None
    """Why it ended before it loaded anything, in its own words."""
    report: Report | None = None
    report_tag: str = ""
    """Of the answer that brought the report: the worker need not send it again while it is the same."""
    report_problem: str | None = None
    deletion_cost: int | None = None
    """As annotated."""
    startup_seconds: float | None = None
    """From its making until it was ready; None while it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Children, workers and state of one deployment at one time."""

    workload: Workload | None
    workers: tuple[Worker, ...]
    session: Session
    round: int = 0
    """Number of the round of readings that the reports are from. 0 counts every observation as a round."""

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(worker.report for worker in self.workers if worker.report and not worker.leaving)

    @property
    def refusals(self) -> tuple[CheckVerdict, ...]:
        """Of workers that found out that they cannot serve, and have not served since."""
        found = (worker.verdict for worker in self.workers if not worker.leaving)
        return tuple(verdict for verdict in found if verdict and not verdict.serves)

    @property
    def last_reports(self) -> tuple[Report, ...]:
        """Of every worker that stays: this look's report, else the last one that came."""
        found = (worker.report or self._last(worker) for worker in self.workers if not worker.leaving)
        return tuple(report for report in found if report)

    def _last(self, worker: Worker) -> Report | None:
        baseline = self.session.baselines.get(worker.uid)
        return baseline.report if baseline else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Acceptance of the whole fleet over the window. Absent while too few drafts were verified."""

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
    """Time that plain decoding would take for the task's tokens, divided by the time taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements over the window of the last minute. They are published at most every half minute, because each
    publication writes status."""

    running: float
    waiting: float
    tokens_per_second: float
    synthetic: bool
    speed: Speed | None = None
    speedup: float | None = None
    """Time that plain decoding would take, divided by the time taken, over all decoding steps. None while no plain
    steps are known to compare with."""
    tasks: Mapping[str, TaskFigures] = field(default_factory=dict)
    saved_device_seconds: float | None = None
    """Running total of LearnedState.saved_device_seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Of one worker, with the mix that comes in and the shapes that would be chosen."""

    rate: float
    """Requests a second."""
    sequences: float
    """That run at this rate."""
    step_seconds: float
    limited_by: Literal["slots", "itl", "ttft", "cache"]
    attainable: bool = True
    """False when a promise is broken by a single sequence: more workers will not help."""


@dataclass(frozen=True, slots=True)
class ScalingLimit:
    """Why demand is not met."""

    reason: Literal["Unschedulable", "AtMaximum", "ObjectiveOutOfReach"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnhealthyWorker:
    """A pod that differs from what it was, and from its peers."""

    pod: str
    uid: str
    reason: Literal["AcceptanceCollapsed", "SlowSteps"]
    message: str
    since: float
    """Operator's clock."""
    acceptance: float | None = None
    """Of the first drafted token, now."""
    usual: float | None = None
    """What it used to be, for the same tasks."""
    pace: float | None = None
    """Seconds of its steps over those of its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What should be so."""

    plan: Plan
    replicas: int
    image: str
    url: str
    selector: str
    """Of the pods, as the scale subresource wants it."""
    children: tuple[Manifest, ...]
    """In the order in which they are applied: the plan before the pods that mount it."""
    pushes: tuple[str, ...] = ()
    """Addresses of workers that run a lower plan version."""
    changes: tuple[DecisionRecord, ...] = ()
    """Decisions made just now, oldest first; each becomes an Event."""
    recommended: str | None = None
    depth: int | None = None
    """Depth that runs at the present load; None while nobody runs."""
    task_depths: Mapping[str, int] = field(default_factory=dict)
    figures: Figures | None = None
    first_acceptance: float | None = None
    """How often the draft's first token is right: the same whatever depth runs."""
    wanted: int | None = None
    """Replicas that demand asks for, before the bounds; None without spec.scaling."""
    history: tuple[DecisionRecord, ...] = ()
    """All decisions that are remembered, newest first, with the gains that came true."""
    pinned: str = ""
    """The pin in force."""
    pin_problem: str | None = None
    """Why the annotation does not read; what was in force stays."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Ready workers whose reports are stale, by pod name, with the first reason."""
    desired: int = 0
    """Replicas that should be, within the bounds: what is set, unless scaling.owner is External."""
    arrivals: float | None = None
    """Requests a second, whole fleet."""
    capacity: Capacity | None = None
    limited: ScalingLimit | None = None
    """What keeps replicas from following demand."""
    deletion_costs: Mapping[str, int] = field(default_factory=dict)
    """By pod, where it is not annotated so yet, shortly before a worker goes: the lowest first."""
    suspects: tuple[UnhealthyWorker, ...] = ()
    own_plans: Mapping[str, Plan] = field(default_factory=dict)
    """By address: the plan of workers that shall not run ``plan``."""
    excluded: frozenset[str] = frozenset()
    """Addresses of workers that do not run the common plan."""
    recycle: tuple[str, ...] = ()
    """Pods to be evicted, so that others take their place."""
    nodes: int | None = None
    """Draft tokens of the shape that runs at the present load."""
    urgent: bool = False
    """The memory must be written before anything else: it holds a decision."""
    learnt: bool = False
    """Something was measured: what moved in the memory is worth a write, at leisure."""


@dataclass(frozen=True, slots=True)
class ChildProblem:
    """A child object that could not be made equal to the desired one."""

    kind: str
    name: str
    reason: Literal["NotOwned", "Refused", "Unavailable"]
    """NotOwned: an object of this name belongs to another controller or user. Refused: the API server rejected the
    request; it is repeated with back-off. Unavailable: the API server or a webhook did not answer."""
    message: str
    """The API server's own sentence."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of applying the desired children."""

    problems: tuple[ChildProblem, ...] = ()
    is_saved: bool = True
    """The state that the decision rests on is persisted."""
