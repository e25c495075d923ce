"""Workers without a node: they do not block scale-down, are withdrawn after a time-out, and are tried again later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.decision.size_stage import size
from specdecode_operator.scaling import (
    TUNING,
    Demand,
    Placement,
    ServiceLoad,
    scale,
)
from specdecode_operator.scaling.replicas import follow_placement, upper_bound
from specdecode_operator.state.learned import LearnedState, ScalingState
from specdecode_operator.state.session import Session
from specdecode_operator.telemetry.deltas import Delta
from specdecode_operator.types import Capacity, Observation, ReplicaDecision, Worker
from support.operators.fleet import SimulatedWorker, Truth, deployment_with, with_spec, workload_with

SPEC = ScalingSpec(min_replicas=1, max_replicas=6, scale_down_window="60s")
REPORT = SimulatedWorker(Truth()).report().model_copy(update={"max_num_seqs": 10})
POLL_SECONDS = 5.0
TIMEOUT = TUNING.placement_timeout_seconds


def worker(name: str, **fields: Any) -> Worker:
    serving = {"address": "10.0.0.1", "ready": True, "report": REPORT}
    return Worker(name=name, uid=name, **{**serving, **fields})


def pending(name: str, created_at: float | None = 0.0, **fields: Any) -> Worker:
    trouble = "Unschedulable: 0/1 nodes are available"
    silent = {"address": None, "ready": False, "report": None, "placed": False, "trouble": trouble}
    return worker(name, **{**silent, "created_at": created_at, **fields})


@dataclass
class Cluster:
    """The size stage against a cluster with a number of nodes, one worker each. One worker carries 8 requests."""

    nodes: int
    spec: ScalingSpec = SPEC
    requests: float = 0.0
    waiting: float = 0.0
    now: float = 1e6
    created: dict[str, float] = field(default_factory=dict)
    placed: set[str] = field(default_factory=set)
    state: ScalingState = field(default_factory=ScalingState)
    names: Iterator[int] = field(default_factory=lambda: iter(range(10_000)))
    is_paused: bool = False
    is_advisory: bool = False

    def poll(self) -> ReplicaDecision:
        self.now += POLL_SECONDS
        decision, state = self._decide()
        self.state = ScalingState.model_validate_json(state.model_dump_json())
        if not self.is_paused:
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
        mode = "Advisory" if self.is_advisory else "Auto"
        deployment = deployment_with(engine={"maxNumSeqs": 10}, speculation={"mode": mode}, paused=self.is_paused)
        deployment = with_spec(deployment, scaling=self.spec)
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


def cluster_with_unplaced(**fields: Any) -> Cluster:
    """Two nodes, and demand for four workers."""
    cluster = Cluster(nodes=2, requests=32, **fields)
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
    unplaced = Placement(placed=2, unplaced=2, oldest_created_at=990)
    assert scale(SPEC, state, load, now=1000, placement=unplaced).replicas == 4
    assert scale(SPEC, state, replace(load, waiting=0), now=1000, placement=unplaced).replicas == 3
    assert scale(SPEC, state, load, now=1000, placement=Placement(placed=4)).replicas == 3


def test_a_long_wait_adds_no_more_workers_while_some_have_no_node() -> None:
    """With every worker serving, a long wait shows that the capacity is estimated too high, and adds one worker."""
    one = Capacity(rate=2.0, sequences=10, step_seconds=0.03, limited_by="slots")
    load = ServiceLoad(
        capacity=one,
        capacity_bound=one,
        arrival_rate=1.0,
        arrival_rate_bound=1.0,
        window_arrival_rate=1.0,
        ttft_seconds=2.0,
    )
    demand = Demand(requests=10, waiting=9, max_num_seqs=10, seconds=5, is_complete=True, load=load)
    state, unplaced = ScalingState(replicas=2), Placement(placed=1, unplaced=1, oldest_created_at=1000)
    assert scale(SPEC, state, demand, now=1000, placement=unplaced).replicas == 2
    assert scale(SPEC, state, demand, now=1000, placement=Placement(placed=2)).replicas == 3


def test_workers_without_a_node_are_withdrawn_and_tried_again_with_back_off() -> None:
    cluster = cluster_with_unplaced()
    started = cluster.now
    decisions = cluster.polls(3 * 3600)
    changes = [
        (started + POLL_SECONDS * index, decision.replicas)
        for index, decision in enumerate(decisions)
        if index and decision.replicas != decisions[index - 1].replicas
    ]
    assert [replicas for _, replicas in changes[:6]] == [2, 4, 2, 4, 2, 4]
    times = [time for time, _ in changes]
    assert times[0] - started == pytest.approx(TIMEOUT, abs=20)
    assert times[1] - times[0] == pytest.approx(600, abs=10)
    assert times[2] - times[1] == pytest.approx(TIMEOUT, abs=10)
    assert times[3] - times[2] == pytest.approx(1200, abs=10)
    assert times[5] - times[4] == pytest.approx(2400, abs=10)


def test_withdrawn_workers_are_not_tried_again_without_demand() -> None:
    cluster = cluster_with_unplaced()
    cluster.polls(TIMEOUT + 10)
    cluster.requests = 8
    assert {decision.replicas for decision in cluster.polls(3600)} <= {1, 2}


def test_a_new_node_ends_the_back_off() -> None:
    cluster = cluster_with_unplaced()
    cluster.polls(TIMEOUT + 600 + TIMEOUT + 20)
    assert (cluster.state.placed_limit, cluster.state.withdrawals) == (2, 2)
    cluster.nodes = 6
    cluster.polls(1200)
    assert len(cluster.placed) == 4
    assert (cluster.state.placed_limit, cluster.state.retry_at, cluster.state.withdrawals) == (None, None, 0)


def test_the_condition_says_so_before_and_after_the_withdrawal() -> None:
    cluster = cluster_with_unplaced()
    before = cluster.poll()
    assert before.limited.message == "2 pods cannot be scheduled: Unschedulable: 0/1 nodes are available"
    reasons = [decision.reason for decision in cluster.polls(TIMEOUT) if decision.replicas == 2]
    assert reasons[0] == "no node for 2 of 4 workers"
    after = cluster.poll()
    assert after.limited.reason == "Unschedulable"
    assert "demand asks for 4 workers, but only 2 could be placed; the next attempt is at" in after.limited.message
    assert cluster.poll().limited == after.limited, "status is written on change"
    cluster.requests = 8
    assert cluster.poll().limited is None


def test_min_replicas_are_never_withdrawn() -> None:
    cluster = cluster_with_unplaced(spec=SPEC.model_copy(update={"min_replicas": 3}))
    replicas = [decision.replicas for decision in cluster.polls(TIMEOUT + 60)]
    assert (min(replicas), replicas[-1]) == (3, 3)
    assert cluster.poll().limited is not None


def test_a_time_out_counts_from_the_creation_even_if_state_is_lost() -> None:
    cluster = cluster_with_unplaced()
    cluster.polls(TIMEOUT - 60)
    cluster.state = ScalingState()
    assert cluster.polls(60)[-1].replicas == 2


@pytest.mark.parametrize("field", ["is_paused", "is_advisory"])
def test_nothing_is_withdrawn_while_replicas_are_not_set(field: str) -> None:
    cluster = cluster_with_unplaced()
    setattr(cluster, field, True)
    assert {decision.replicas for decision in cluster.polls(2 * TIMEOUT)} == {4}
    assert cluster.state.retry_at is None


def test_a_terminating_worker_may_hold_the_node_that_another_waits_for() -> None:
    state = ScalingState(replicas=3)
    waits = Placement(placed=2, unplaced=1, oldest_created_at=0, is_node_held=True)
    assert follow_placement(SPEC, state, waits, replicas=3, now=1e4).replicas == 3
    assert follow_placement(SPEC, state, replace(waits, is_node_held=False), replicas=3, now=1e4).replicas == 2


def test_a_new_deployment_of_which_no_worker_is_placed_stays_at_the_minimum() -> None:
    cluster = Cluster(nodes=0)
    assert {decision.replicas for decision in cluster.polls(3600)} == {1}


def test_the_bound_of_a_withdrawal_follows_the_spec_and_the_clock() -> None:
    state = ScalingState(placed_limit=2, retry_at=100)
    assert upper_bound(SPEC, state, 99) == 2
    assert upper_bound(SPEC, state, 100) == 6
    assert upper_bound(SPEC.model_copy(update={"min_replicas": 3}), state, 99) == 3
    assert upper_bound(SPEC, ScalingState(), 0) == 6


placements = st.builds(
    Placement,
    placed=st.integers(0, 9),
    unplaced=st.integers(0, 9),
    oldest_created_at=st.one_of(st.none(), st.floats(0, 1e4)),
    is_node_held=st.booleans(),
)


@given(st.lists(st.tuples(placements, st.floats(0, 200), st.booleans(), st.floats(0, 1000)), max_size=40))
def test_any_placement_gives_replicas_within_the_bounds(
    history: list[tuple[Placement, float, bool, float]],
) -> None:
    spec, state, now = SPEC.model_copy(update={"min_replicas": 2}), ScalingState(), 0.0
    for placement, requests, complete, seconds in history:
        now += seconds
        demand = Demand(requests=requests, max_num_seqs=10, seconds=seconds, is_complete=complete)
        before, result = state.replicas or 2, scale(spec, state, demand, now=now, placement=placement)
        state = result.state
        assert 2 <= result.replicas == state.replicas <= upper_bound(spec, state, now) <= 6
        assert result.replicas >= min(before - 1, max(2, placement.placed)), "a withdrawal leaves the placed workers"
