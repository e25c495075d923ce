"""A worker whose truth is known: it turns acceptance and step times into the reports that a real one would send."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic.alias_generators import to_camel

from specdecode_operator.api.v1alpha1 import STABILITY, Spec, SpeculationSpec, StabilityLimits, Status
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.learned import LearnedState, RunRecord, Session, parse_state, render_state
from specdecode_operator.types import Decision, Defaults, Deployment, Observation, Worker, Workload
from specdecode_worker.contract import (
    OTHER_TASK,
    DraftState,
    Method,
    Plan,
    PlanState,
    Report,
    RequestCell,
    SyntheticKnobs,
    TrafficCell,
    TreeShape,
    draft_passes,
)
from support.operators.reports import main_cell, step_cell, step_values

DEFAULTS = Defaults(worker_image="localhost/worker:1", worker_image_pull_policy="IfNotPresent")
RUN = RunRecord(id="6740f2a1", started=1.0, draft_uri="hf://org/head", claim="drafts")
"""A training run whose drafts go to the claim ``drafts``."""
StepTime = Callable[[float, int, float], float]


def linear_time(sequences: float, depth: int, context: float) -> float:
    """20 ms, 2 ms a draft pass, 0.4 ms a verified token."""
    return 0.020 + 0.002 * depth + 0.0004 * sequences * (depth + 1) + 1e-8 * sequences * context


@dataclass
class Truth:
    """True behaviour of the simulated worker, which the operator estimates from reports."""

    chances: list[float] = field(default_factory=lambda: [0.8, 0.7, 0.6, 0.5, 0.4])
    step_time: StepTime = linear_time
    sequences: int = 1
    context: float = 500.0
    noise: float = 0.05
    draft: str = "d1"
    method: Method = "eagle3"
    waiting: float = 0.0


@dataclass
class SimulatedWorker:
    """Runs steps by its plan, explores a share of its time, scores shadow drafts; counts as contract.Report does."""

    truth: Truth
    plan: Plan = field(default_factory=Plan)
    explore: float = 0.05
    seed: int = 0
    boot_id: str = "boot-1"
    clock: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    steps: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    ranks: dict[int, list[int]] = field(default_factory=dict)
    request: list[int] = field(default_factory=lambda: [0] * 6)
    synthetic: SyntheticKnobs | None = None
    task: str = OTHER_TASK
    """That of all requests."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._rotation = 0

    def run(self, seconds: float) -> None:
        end = self.clock + seconds
        while self.clock < end:
            if self.random.random() < self.explore / 4:
                self._rotation = (self._rotation + 1) % (max(self.plan.max_depth, 1) + 1)
                for _ in range(14):
                    self._step(self._rotation)
            else:
                self._step(self.depth)

    @property
    def depth(self) -> int:
        concurrency = sum(self.truth.sequences > edge for edge in self.plan.buckets.concurrency)
        context = sum(self.truth.context > edge for edge in self.plan.buckets.context)
        is_planned = self.plan.draft == self.truth.draft
        shape = self.plan.shape(concurrency, context, self.task) if is_planned else self.plan.initial
        return shape.depth

    def passes(self, depth: int) -> int:
        return draft_passes(self.truth.method, depth)

    def report(self) -> Report:
        count = {name: int(value) for name, value in self.counters.items() if not name.endswith("seconds")}
        return Report(
            boot_id=self.boot_id,
            worker="w",
            clock_seconds=self.clock,
            draft=DraftState(method=self.truth.method, hash=self.truth.draft),
            plan=PlanState(
                uid=self.plan.uid,
                version=self.plan.version,
                draft=self.plan.draft,
                matches_draft=self.plan.draft == self.truth.draft,
                quiet=self.plan.quiet,
                buckets=self.plan.buckets,
            ),
            max_num_seqs=16,
            synthetic=self.synthetic,
            running=self.truth.sequences,
            running_request_seconds=self.counters.get("running_seconds", 0),
            waiting_request_seconds=self.counters.get("waiting_seconds", 0),
            drafts=count.get("drafts", 0),
            draft_tokens=count.get("draft_tokens", 0),
            accepted_tokens=count.get("accepted_tokens", 0),
            plain_steps=count.get("plain_steps", 0),
            acceptance=tuple(
                main_cell(self.truth.draft, self.task, depth, ranks) for depth, ranks in sorted(self.ranks.items())
            ),
            requests=(self._requests(),),
            steps=tuple(step_cell(*key, values) for key, values in sorted(self.steps.items())),
            traffic=(
                TrafficCell(
                    task=self.task,
                    arrivals=0,
                    finished=0,
                    prompt_tokens=0,
                    cached_tokens=0,
                    output_tokens=count.get("output", 0),
                ),
            ),
        )

    def _step(self, depth: int) -> None:
        truth = self.truth
        seconds = truth.step_time(truth.sequences, depth, truth.context) * (1 + self.random.gauss(0, truth.noise))
        accepted = sum(self._sequence(depth) for _ in range(truth.sequences))
        emitted = truth.sequences + accepted
        packed, passes = truth.sequences * (depth + 1), self.passes(depth)
        key = (1 << (packed - 1).bit_length(), passes, sum(truth.context > edge for edge in self.plan.buckets.context))
        x = (1.0, truth.sequences, packed, truth.sequences * truth.context, passes, 0.0)
        values = step_values(seconds, emitted, x)
        known = self.steps.setdefault(key, [0.0] * len(values))
        self.steps[key] = [a + b for a, b in zip(known, values, strict=True)]
        self.clock += seconds
        for name, value in {
            "running_seconds": truth.sequences * seconds,
            "waiting_seconds": truth.waiting * seconds,
            "output": emitted,
            "drafts": truth.sequences * bool(depth),
            "plain_steps": truth.sequences * (not depth),
            "draft_tokens": truth.sequences * depth,
            "accepted_tokens": accepted,
        }.items():
            self.counters[name] = self.counters.get(name, 0) + value

    def _sequence(self, depth: int) -> int:
        """Return the accepted tokens of one sequence; depths beyond the one in use are scored in the shadow."""
        accepted = 0
        for level, chance in enumerate(self.truth.chances[: max(depth, self.plan.max_depth)], start=1):
            hit = self.random.random() < chance
            self.ranks.setdefault(level, [0] * 9)[0 if hit else 8] += 1
            if not hit:
                break
            accepted += level <= depth
        if depth:
            for index, value in enumerate((1, accepted, 1, accepted**2, accepted, 1)):
                self.request[index] += value
        return accepted

    def _requests(self) -> RequestCell:
        n, a, d, aa, ad, dd = self.request
        return RequestCell(draft=self.truth.draft, task=self.task, sampled=False, n=n, a=a, d=d, aa=aa, ad=ad, dd=dd)


SPEC: dict[str, Any] = {
    "model": {"uri": "embedded://t"},
    "speculation": {"method": "eagle3", "draft": {"uri": "embedded://d"}},
    "workers": {"accelerator": {"count": 0}},
    "engine": {"maxNumSeqs": 16},
    "router": {"replicas": 0},
}


def deep(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` laid over its objects. None stays: a user can write null into a template."""
    result = dict(base)
    for key, value in over.items():
        result[key] = (
            deep(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
        )
    return result


class LimitedSpeculation(SpeculationSpec):
    """Speculation whose limits a test chose, instead of those of speculation.stability."""

    chosen: StabilityLimits

    @property
    def limits(self) -> StabilityLimits:
        return self.chosen


def speculation_of(fields: Mapping[str, Any]) -> SpeculationSpec:
    """Return spec.speculation. The key ``limits`` has fields of StabilityLimits that differ from Medium."""
    given = dict(fields)
    limits = given.pop("limits", None)
    plain = SpeculationSpec.model_validate(given, extra="forbid")
    if limits is None:
        return plain
    return LimitedSpeculation(**plain.model_dump(), chosen=replace(STABILITY["Medium"], **limits))


def deployment_with(status: Status | None = None, **spec: Any) -> Deployment:
    """Return a deployment. speculation may have the key ``limits`` of `speculation_of`."""
    fields = deep(SPEC, {to_camel(name): value for name, value in spec.items()})
    speculation = speculation_of(fields.pop("speculation"))
    return Deployment(
        namespace="ns",
        name="demo",
        uid="u1",
        generation=1,
        spec=Spec.model_validate(fields, extra="forbid").model_copy(update={"speculation": speculation}),
        status=status or Status(),
    )


def deployment_of(spec: Mapping[str, Any], *, namespace: str = "team-a", name: str = "llama") -> Deployment:
    """Return the deployment of a user's spec."""
    parsed = Spec.model_validate(spec)
    return Deployment(namespace=namespace, name=name, uid="u", generation=1, spec=parsed, status=Status())


def with_pin(deployment: Deployment, pin: str | None, **by_task: str) -> Deployment:
    """Return the deployment with these pins alone, of all tasks and of some by name, as a user sets them."""
    spec = deployment.spec
    tasks = tuple(one.model_copy(update={"pin": by_task.get(one.name)}) for one in spec.speculation.tasks)
    speculation = spec.speculation.model_copy(update={"pin": pin, "tasks": tasks})
    return replace(deployment, spec=spec.model_copy(update={"speculation": speculation}))


def with_spec(deployment: Deployment, **fields: Any) -> Deployment:
    """Return the deployment with other fields of its spec, which are models already."""
    return replace(deployment, spec=deployment.spec.model_copy(update=fields))


def with_pause(deployment: Deployment, paused: bool = True) -> Deployment:
    return replace(deployment, spec=deployment.spec.model_copy(update={"paused": paused}))


def workload_with(replicas: int = 1, **fields: Any) -> Workload:
    return Workload(
        **{
            "generation": 1,
            "observed_generation": 1,
            "wanted": replicas,
            "replicas": replicas,
            "updated": replicas,
            "ready": replicas,
            "available": replicas,
            **fields,
        }
    )


def observation_with(session: Session | None = None, **seen: Any) -> Observation:
    """Return an observation of one available worker without a report; ``seen`` replaces its fields."""
    return Observation(**{"workload": workload_with(), "workers": (), "session": session or Session(), **seen})


def decided(
    deployment: Deployment, session: Session | None = None, *, now: float = 1000.0, **seen: Any
) -> tuple[Decision, Session]:
    """Return one decision and the session after it. ``seen`` replaces fields of `observation_with`."""
    return decide(deployment, observation_with(session, **seen), DEFAULTS, now=now)


@dataclass
class Loop:
    """The pure loop closed over one simulated worker: poll, decide, push, run on."""

    deployment: Deployment
    worker: SimulatedWorker
    now: float = 1_000_000.0
    memory: Session = field(default_factory=Session)
    decision: Decision | None = None
    versions: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def poll(self, seconds: float = 5.0) -> Decision:
        self.worker.run(seconds)
        self.now += seconds
        pod = Worker(name="p", uid="p", address="10.0.0.1", ready=True, report=self.worker.report())
        self.decision, self.memory = decided(self.deployment, self.memory, now=self.now, workers=(pod,))
        if self.decision.pushes:
            self.worker.plan = self.decision.plan
        self.versions.append(self.decision.plan.version)
        self.depths.append(self.worker.depth)
        return self.decision

    def polls(self, count: int) -> Decision:
        for _ in range(count):
            self.poll()
        return self.decision

    def restart_operator(self) -> None:
        """All that the process knew is gone but what the ConfigMap has."""
        self.memory = restarted(self.memory)


@dataclass
class Fleet:
    """The pure loop closed over several simulated workers, by name."""

    deployment: Deployment
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    now: float = 1_000_000.0
    memory: Session = field(default_factory=Session)

    def poll(self) -> Decision:
        self.now += 5
        pods = []
        for name, worker in self.workers.items():
            worker.run(5)
            pods.append(Worker(name=name, uid=name, address=f"at-{name}", ready=True, report=worker.report()))
        seen = {"workload": workload_with(len(pods)) if pods else None, "workers": tuple(pods)}
        decision, self.memory = decided(self.deployment, self.memory, now=self.now, **seen)
        for name, worker in self.workers.items():
            if f"at-{name}" in decision.pushes:
                worker.plan = decision.plan
            worker.plan = decision.health.own_plans.get(f"at-{name}", worker.plan)
        return decision

    def polls(self, count: int) -> list[Decision]:
        return [self.poll() for _ in range(count)]


def restarted(session: Session) -> Session:
    """Return the session of a new process: what the ConfigMap has, and the drafts."""
    learned = parse_state(render_state(session.learned), "u1", session.learned.plan)
    return Session(learned=learned or LearnedState(uid="u1"), drafts=session.drafts)


def loop_over(truth: Truth | None = None, *, explore: float = 0.05, seed: int = 0, **spec: Any) -> Loop:
    """Return a loop that starts with depth 3 everywhere, as an operator that has just made its first plan."""
    worker = SimulatedWorker(truth or Truth(), plan=Plan(initial=TreeShape.chain(3)), explore=explore, seed=seed)
    return Loop(deployment_with(**spec), worker)


def per_token(truth: Truth, depth: int) -> float:
    """Return the time per token of a chain, computed from the true chances and step times."""
    tokens = survival = 1.0
    for chance in truth.chances[:depth]:
        survival *= chance
        tokens += survival
    return truth.step_time(truth.sequences, depth, truth.context) / tokens
