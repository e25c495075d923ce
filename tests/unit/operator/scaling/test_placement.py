"""Workers without a node: which they are, that they do not block scale-down, and how the condition names them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling import Demand, is_complete, placement_problem, scale, scaling_limit, size
from specdecode_operator.state.learned import LearnedState, ScalingState, Session
from specdecode_operator.telemetry.counters import Delta
from specdecode_operator.types import Capacity, Observation, ReplicaDecision, Worker
from support.operators.fleet import SimulatedWorker, Truth, deployment_with, with_spec, workload_with

SPEC = ScalingSpec(min_replicas=1, max_replicas=6, scale_down_window="60s")
REPORT = SimulatedWorker(Truth()).report().model_copy(update={"max_num_seqs": 10})
POLL_SECONDS = 5.0


def worker(name: str, **fields: Any) -> Worker:
    serving = {"address": "10.0.0.1", "ready": True, "report": REPORT}
    return Worker(name=name, uid=name, **{**serving, **fields})


def pending(name: str, created_at: float | None = 0.0, **fields: Any) -> Worker:
    trouble = "Unschedulable: 0/1 nodes are available"
    silent = {"address": None, "ready": False, "report": None, "placed": False, "trouble": trouble}
    return worker(name, **{**silent, "created_at": created_at, **fields})


def test_pods_that_cannot_be_created_count_as_without_a_node() -> None:
    workload = workload_with(2, wanted=4, replica_failure="exceeded quota: gpus")
    workers = (worker("a"), worker("b"))
    assert is_complete(workload, workers)
    assert placement_problem(workload, workers) == "2 pods cannot be created: exceeded quota: gpus"


def test_any_reason_of_the_scheduler_is_reported() -> None:
    gated = pending("b", trouble="SchedulingGated: waits for its gates")
    broken = worker("c", ready=False, trouble="worker: CrashLoopBackOff: x")
    problem = placement_problem(workload_with(3), (worker("a"), gated, broken))
    assert problem == "1 pods cannot be scheduled: SchedulingGated: waits for its gates"
    assert placement_problem(workload_with(2), (worker("a"), broken)) is None


def test_lag_of_the_replica_set_is_no_failure() -> None:
    workload = workload_with(2, wanted=4)
    assert placement_problem(workload, (worker("a"), worker("b"))) is None
    assert not is_complete(workload, (worker("a"), worker("b")))


@pytest.mark.parametrize(
    ("workers", "fields", "complete"),
    [
        ((worker("a"), worker("b")), {}, True),
        ((worker("a"), pending("b")), {"available": 1}, True),
        ((worker("a"), worker("b", ready=False)), {"available": 1}, False),
        ((worker("a"), worker("b", report=None)), {}, False),
        ((worker("a"), pending("b")), {"available": 1, "updated": 1}, False),
        ((worker("a"), worker("b")), {"generation": 2}, False),
        ((worker("a"), worker("b"), worker("c", leaving=True, report=None)), {}, True),
        ((worker("a"), worker("b")), {"wanted": 1}, False),
    ],
)
def test_readings_are_complete_when_every_placed_worker_reports(
    workers: tuple[Worker, ...], fields: dict[str, Any], complete: bool
) -> None:
    assert is_complete(workload_with(2, **fields), workers) is complete
    assert not is_complete(None, workers)


def test_unschedulable_pods_are_reported_before_the_maximum() -> None:
    carries = Capacity(rate=2.0, sequences=10, step_seconds=0.03, limited_by="slots")
    problem = placement_problem(None, (pending("a"), worker("b", ready=False, trouble="worker: CrashLoopBackOff: x")))
    assert scaling_limit(SPEC, 3, carries) is None
    at_most = scaling_limit(SPEC, 9, carries)
    unplaced = scaling_limit(SPEC, 9, carries, placement_problem=problem)
    assert (at_most.reason, unplaced.reason) == ("AtMaximum", "Unschedulable")
    assert "1 pods" in unplaced.message


# --- a cluster of few nodes -----------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """The size stage against a cluster with a number of nodes, one worker each. One worker carries 8 requests."""

    nodes: int
    requests: float = 0.0
    waiting: float = 0.0
    now: float = 1e6
    created: dict[str, float] = field(default_factory=dict)
    placed: set[str] = field(default_factory=set)
    state: ScalingState = field(default_factory=ScalingState)
    names: Iterator[int] = field(default_factory=lambda: iter(range(10_000)))

    def poll(self) -> ReplicaDecision:
        self.now += POLL_SECONDS
        decision, state = self._decide()
        self.state = ScalingState.model_validate_json(state.model_dump_json())
        self._reconcile(decision.replicas)
        return decision

    def polls(self, seconds: float) -> list[ReplicaDecision]:
        return [self.poll() for _ in range(int(seconds / POLL_SECONDS))]

    def _decide(self) -> tuple[ReplicaDecision, ScalingState]:
        workers = tuple(
            worker(name) if name in self.placed else pending(name, created_at=at) for name, at in self.created.items()
        )
        count = len(workers)
        delta = Delta(at=self.now, seconds=POLL_SECONDS, running=self.requests, waiting=self.waiting)
        observed = Observation(
            workload=workload_with(count, available=len(self.placed)) if count else None,
            workers=workers,
            session=Session(),
        )
        deployment = with_spec(deployment_with(engine={"maxNumSeqs": 10}), scaling=SPEC)
        return size(deployment, observed, LearnedState(scaling=self.state), delta, (delta,), self.now)

    def _reconcile(self, replicas: int) -> None:
        while len(self.created) > replicas:
            gone = min(self.created, key=lambda name: (name in self.placed, -self.created[name]))
            del self.created[gone]
            self.placed.discard(gone)
        while len(self.created) < replicas:
            self.created[f"w{next(self.names)}"] = self.now
        for name in sorted(self.created, key=lambda name: self.created[name]):
            if len(self.placed) < self.nodes:
                self.placed.add(name)


def cluster_with_unplaced() -> Cluster:
    """Two nodes, and demand for four workers."""
    cluster = Cluster(nodes=2, requests=32)
    cluster.polls(20)
    assert (len(cluster.created), len(cluster.placed)) == (4, 2)
    return cluster


def test_scale_down_does_not_wait_for_workers_without_a_node() -> None:
    cluster = cluster_with_unplaced()
    cluster.requests = 0
    replicas = [decision.replicas for decision in cluster.polls(90)]
    assert replicas[:12] == [4] * 12, "the window of 60 s comes first"
    assert replicas[-1] == 1


def test_waiting_requests_may_be_for_the_workers_without_a_node() -> None:
    """A scale-up that a node is on its way for is not taken back while requests wait."""
    load = Demand(requests=3, waiting=2, max_num_seqs=10, seconds=5, is_complete=True)
    state = ScalingState(replicas=4, below_since=0)
    unplaced = replace(load, are_all_placed=False)
    assert scale(SPEC, state, unplaced, now=1000)[0].replicas == 4
    assert scale(SPEC, state, replace(unplaced, waiting=0), now=1000)[0].replicas == 3
    assert scale(SPEC, state, load, now=1000)[0].replicas == 3


def test_demand_keeps_the_workers_without_a_node() -> None:
    """A node may join at any time; the condition says meanwhile why fewer workers serve."""
    cluster = cluster_with_unplaced()
    assert {decision.replicas for decision in cluster.polls(3600)} == {4}
    limited = cluster.poll().limited
    assert limited.reason == "Unschedulable"
    assert limited.message == "2 pods cannot be scheduled: Unschedulable: 0/1 nodes are available"


def test_a_new_deployment_of_which_no_worker_is_placed_stays_at_the_minimum() -> None:
    cluster = Cluster(nodes=0)
    assert {decision.replicas for decision in cluster.polls(3600)} == {1}
