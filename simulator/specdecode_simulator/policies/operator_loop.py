"""Our operator: decide() as it is, every poll, on the reports of modelled workers; they run its plans."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specdecode_operator.api.v1alpha1 import ScalingSpec, Spec, Status, TreeSpec
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.learned import LastReport, LearnedState, Session, parse_state, render_state
from specdecode_operator.types import Decision, Defaults, Deployment, Observation, Workload
from specdecode_operator.types import Worker as Seen
from specdecode_simulator.records.acceptance_walks import PLAIN, Form, form_of
from specdecode_simulator.traces.trace import Trace
from specdecode_simulator.world.counters import DRAFT
from specdecode_simulator.world.fleet import Fleet, Pod
from specdecode_simulator.world.plan_pilot import PlanPilot
from specdecode_simulator.world.worker import CALIBRATION_CONTEXT
from specdecode_worker.contract import Plan, Report, suppressed_loads

START = 1_800_000_000.0
"""The operator's clock at the start of a trace."""
DEEPEST = 7
DEFAULTS = Defaults(worker_image="localhost/worker:1", worker_image_pull_policy="IfNotPresent")


def deployment_for(trace: Trace, *, scaled: bool, given: Mapping[str, Any] | None = None) -> Deployment:
    """Return the resource that a user would write for this trace; other fields have the operator's defaults.

    Args:
        trace: Trace that says model, draft and tasks.
        scaled: The operator owns the replicas.
        given: Fields of spec.speculation that replace the defaults.

    Raises:
        pydantic.ValidationError: A field does not exist or is invalid.
    """
    speculation: dict[str, Any] = {
        "depth": {"min": 0, "max": DEEPEST, "initial": 3},
        "objective": {
            "itl": f"{max(1, round(1000 * trace.ttit_seconds))}ms",
            "ttft": f"{max(1, round(1000 * trace.ttft_seconds))}ms",
        },
        **(given or {}),
        "method": "eagle3",
        "draft": {"uri": "embedded://recorded"},
        "tasks": [{"name": name} for name in trace.labels[:-1]],
    }
    spec: dict[str, Any] = {
        "model": {"uri": "embedded://simulated"},
        "speculation": speculation,
        "replicas": trace.replicas,
        "workers": {"accelerator": {"count": 0}},
        "engine": {
            "maxNumSeqs": trace.limits.max_num_seqs,
            "maxNumBatchedTokens": trace.limits.max_num_batched_tokens,
            "kvCacheTokens": trace.limits.kv_tokens,
        },
    }
    if scaled:
        scaling = {"owner": "Operator", "minReplicas": 1, "maxReplicas": trace.most_replicas}
        spec["scaling"] = ScalingSpec.model_validate(scaling).model_dump(by_alias=True)
    validated = Spec.model_validate(spec)
    return Deployment(
        namespace="simulated", name=trace.name[:40], uid="simulated", generation=1, spec=validated, status=Status()
    )


@dataclass(frozen=True, slots=True)
class KeptReport(LastReport):
    """Last report of a worker that is not compressed: a fleet has few."""

    kept: Report | None = None

    @property
    def report(self) -> Report:
        assert self.kept is not None
        return self.kept


class Look(NamedTuple):
    """State after a poll in which workers reported that they run the plan."""

    at: float
    drafts: int
    """Drafts so far."""
    plan: Plan
    suspended: set[tuple[int, int]]
    """Loads (concurrency, context) at which the guards of all workers suspend speculation."""

    def form(self, sequences: float, context_tokens: float, task: str) -> Form:
        """Return the shape in use for requests of ``task`` at a load."""
        edges = self.plan.buckets
        load = bisect_left(edges.concurrency, sequences), bisect_left(edges.context, context_tokens)
        return PLAIN if load in self.suspended else form_of(self.plan.shape(*load, task).parents)


@dataclass(slots=True)
class Ours:
    """``log`` keeps every decision with its time; ``versions`` counts plans that went out."""

    trace: Trace
    seed: int
    scaled: bool
    given: Mapping[str, Any] | None = None
    memory: Session = field(default_factory=lambda: Session(learned=LearnedState(uid="simulated")))
    versions: int = 0
    log: list[tuple[float, Any]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    decision: Decision | None = None
    _deployment: Deployment | None = None
    _coins: Any = None
    _was_away: bool = False

    def __post_init__(self) -> None:
        self._deployment = deployment_for(self.trace, scaled=self.scaled, given=self.given)
        self._coins = np.random.default_rng([self.seed, 80])

    @property
    def tree(self) -> TreeSpec:
        """Bounds of trees."""
        assert self._deployment is not None
        return self._deployment.spec.speculation.tree

    def pilot(self, fleet: Fleet, index: int) -> PlanPilot:
        """A new pod mounts the plan that is out."""
        table = fleet.truth(index).table

        def step_seconds(sequences: int, passes: int) -> float:
            return table.seconds(sequences, sequences, passes, CALIBRATION_CONTEXT * sequences)

        pilot = PlanPilot(fleet.trace.labels, self._plan(), step_seconds, DRAFT)
        pilot.calibrate(self.trace.limits.max_num_seqs)
        return pilot

    def poll(self, fleet: Fleet, now: float) -> int | None:
        if self.trace.away(now):
            self._was_away = True
            return None
        if self._was_away:
            self._restarted()
        assert self._deployment is not None
        observed = self._observed(fleet, now)
        decision, self.memory = decide(self._deployment, observed, DEFAULTS, now=START + now)
        before = self.decision.plan.version if self.decision else None
        self.versions += before is not None and decision.plan.version != before
        self.log += [(now, change) for change in decision.changes]
        drafts = sum(worker.counters.drafts for worker in fleet.workers)
        if decision.shown.depth is not None:
            suspended = suppressed_loads(observed.reports, decision.plan.version)
            self.looks.append(Look(now, drafts, decision.plan, suspended))
        self.decision = decision
        for pod in fleet.pods:
            if f"10.0.0.{pod.index}" in decision.pushes:
                pilot = pod.worker.pilot
                assert isinstance(pilot, PlanPilot)
                pilot.take(decision.plan)
        return decision.scale.replicas if self.scaled else None

    def _plan(self) -> Plan:
        """The plan that is out. The first is written before the first pod is: it says depth.initial."""
        if self.memory.learned.plan is None:
            assert self._deployment is not None
            observed = Observation(workload=None, workers=(), session=self.memory)
            self.decision, self.memory = decide(self._deployment, observed, DEFAULTS, now=START)
        assert self.memory.learned.plan is not None
        return self.memory.learned.plan

    def _restarted(self) -> None:
        """All that the process knew is gone but what the ConfigMap has."""
        self._was_away = False
        learned = parse_state(render_state(self.memory.learned), "simulated", self.memory.learned.plan)
        self.memory = Session(learned=learned or LearnedState(uid="simulated"))

    def _observed(self, fleet: Fleet, now: float) -> Observation:
        ready = len(fleet.ready)
        count = len(fleet.staying)
        workload = Workload(
            generation=1,
            observed_generation=1,
            wanted=fleet.wanted,
            replicas=count,
            updated=count,
            ready=ready,
            available=ready,
        )
        return Observation(
            workload=workload, workers=tuple(self._seen(pod, now) for pod in fleet.pods), session=self.memory
        )

    def _seen(self, pod: Pod, now: float) -> Seen:
        is_ready = pod.ready_at <= now
        lost = self._coins.random() < self.trace.lost(pod.index, now)
        report = None
        if is_ready and not lost:
            pilot = pod.worker.pilot
            assert isinstance(pilot, PlanPilot)
            report = pod.worker.report(f"boot-{pod.index}", pilot.state, pilot.guard.cells())
        return Seen(
            name=pod.uid,
            uid=pod.uid,
            address=f"10.0.0.{pod.index}",
            ready=is_ready,
            leaving=pod.leaving,
            report=report,
            baseline=KeptReport(b"", report.clock_seconds, kept=report) if report else None,
            report_problem="no answer" if is_ready and lost else None,
        )
