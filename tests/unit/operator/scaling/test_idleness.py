"""From requests at routers and workers to zero replicas and back, with literal values."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling import size
from specdecode_operator.state.learned import LearnedState, ScalingState, Session
from specdecode_operator.telemetry.counters import Delta
from specdecode_operator.types import Observation, ReplicaDecision, Worker
from specdecode_worker.contract import DraftState, Report
from specdecode_worker.contract.demand import HeldRequests
from support.operators.fleet import decided, deployment_with, with_spec, workload_with

SPEC = ScalingSpec(min_replicas=0, max_replicas=3, idle_after="100s")
IDLE = Delta(seconds=5)


def worker(name: str = "p", *, ready: bool = True, reported: bool = True, **counts: int) -> Worker:
    report = Report(
        boot_id="b", worker=name, clock_seconds=1, max_num_seqs=10, draft=DraftState(method="none"), **counts
    )
    return Worker(name=name, uid=name, address="10.0.0.1", ready=ready, report=report if reported and ready else None)


def sized(
    now: float,
    *workers: Worker,
    state: ScalingState | None = None,
    delta: Delta | None = IDLE,
    replicas: int = 1,
    held: int = 0,
    scaling: ScalingSpec = SPEC,
    **spec: Any,
) -> tuple[ReplicaDecision, ScalingState]:
    known = state or ScalingState(replicas=replicas, spec_replicas=1, owned=True)
    observed = Observation(
        workload=workload_with(len(workers)),
        workers=workers,
        session=Session(),
        demand={"router": HeldRequests(requests=held, at=now)} if held else {},
    )
    deployment = with_spec(deployment_with(**{"engine": {"maxNumSeqs": 10}, **spec}), scaling=scaling)
    return size(deployment, observed, LearnedState(scaling=known), delta, (), now)


def test_no_worker_runs_after_the_idle_time() -> None:
    decision, state = sized(0, worker())
    assert (decision.replicas, state.idle_since) == (1, 0)
    decision, state = sized(99, worker(), state=state)
    assert decision.replicas == 1
    decision, state = sized(100, worker(), state=state)
    assert (decision.replicas, decision.reason) == (0, "no requests for 100 s")
    assert (state.replicas, state.idle_since) == (0, None)


@pytest.mark.parametrize(
    ("counts", "delta", "held"),
    [
        ({"running": 1}, IDLE, 0),
        ({"waiting": 1}, IDLE, 0),
        ({}, Delta(seconds=5, running=0.01), 0),
        ({}, IDLE, 1),
    ],
    ids=["running", "waiting", "ran between the polls", "held"],
)
def test_a_request_starts_the_idle_time_again(counts: dict[str, int], delta: Delta, held: int) -> None:
    _, state = sized(0, worker())
    decision, state = sized(200, worker(**counts), state=state, delta=delta, held=held)
    assert (decision.replicas, state.idle_since) == (1, None)
    decision, state = sized(205, worker(), state=state)
    assert (decision.replicas, state.idle_since) == (1, 205)


def test_a_worker_without_a_report_may_be_busy() -> None:
    silent = worker("q", reported=False)
    _, state = sized(0, worker("p"), worker("q"), replicas=2)
    decision, state = sized(200, worker("p"), silent, state=state)
    assert decision.replicas == 2
    decision, _ = sized(205, worker("p"), worker("q"), state=state)
    assert decision.replicas == 0, "the silence only delays it"


@pytest.mark.parametrize("fields", [{"delta": None}, {"paused": True}], ids=str)
def test_the_idle_time_begins_anew_where_nobody_counted_requests(fields: dict[str, Any]) -> None:
    """After a start of the operator, and after a pause, there may have been any since the last poll."""
    _, state = sized(0, worker())
    _, state = sized(500, worker(), state=state, **fields)
    decision, state = sized(505, worker(), state=state)
    assert decision.replicas == 1
    assert state.idle_since in (500, 505)


def test_workers_that_start_are_waited_for() -> None:
    state: ScalingState | None = None
    for now in (0, 200, 400):
        decision, state = sized(now, worker(ready=False), state=state, delta=None)
        assert decision.replicas == 1


@pytest.mark.parametrize(("held", "replicas"), [(0, 0), (1, 1), (8, 1), (9, 2), (1000, 3)])
def test_held_requests_start_workers(held: int, replicas: int) -> None:
    """A worker runs 10 sequences, of which 8 are planned for; there are at most 3 workers."""
    decision, state = sized(0, replicas=0, delta=None, held=held)
    assert (decision.replicas, state.replicas) == (replicas, replicas)


def test_one_scale_up_for_requests_that_stay_held() -> None:
    """Held requests of a cold start are not counted twice: the number of workers follows the queue afterwards."""
    _, state = sized(0, replicas=0, delta=None, held=1)
    for now in (10, 20, 30):
        decision, state = sized(now, worker(ready=False), state=state, delta=None, held=20)
        assert decision.replicas == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"paused": True},
        {"speculation": {"mode": "Advisory"}},
        {"scaling": SPEC.model_copy(update={"owner": "External"})},
    ],
)
def test_replicas_that_the_operator_does_not_set_stay(fields: dict[str, Any]) -> None:
    _, state = sized(0, worker(), **fields)
    decision, _ = sized(500, worker(), state=state, **fields)
    assert decision.replicas == 1


def test_a_lower_bound_above_zero_never_rests() -> None:
    spec = ScalingSpec(min_replicas=1, idle_after="100s")
    _, state = sized(0, worker(), scaling=spec)
    decision, state = sized(500, worker(), state=state, scaling=spec)
    assert (decision.replicas, state.idle_since) == (1, None)


def test_a_raised_lower_bound_starts_workers() -> None:
    decision, _ = sized(0, replicas=0, delta=None, scaling=ScalingSpec(min_replicas=2))
    assert decision.replicas == 2


def resting(held_at: float | None, *, stored: int | None = 0) -> int:
    """Return the replicas that a whole decision at 1000 s makes of a deployment at zero."""
    scaling = ScalingState() if stored is None else ScalingState(replicas=stored, spec_replicas=1, owned=True)
    deployment = deployment_with(
        scaling={"minReplicas": 0}, router={"replicas": 2}, speculation={"method": "none", "draft": None}
    )
    demand = {} if held_at is None else {"demo-router-a": HeldRequests(requests=20, at=held_at)}
    session = Session(learned=LearnedState(uid="u1", scaling=scaling))
    return decided(deployment, session, workload=workload_with(0), demand=demand)[0].scale.replicas


@pytest.mark.parametrize("stored", [0, None], ids=["same operator", "state lost"])
def test_the_decision_follows_fresh_reports_of_routers(stored: int | None) -> None:
    assert resting(None, stored=stored) == 0
    assert resting(995, stored=stored) == 2
    assert resting(1030, stored=stored) == 2, "a clock that is ahead"
    assert resting(900, stored=stored) == 0, "the router is gone"
