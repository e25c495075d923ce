"""Placement of workers: pods with a node, completeness of readings without the others, and the reported problem."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.scaling import is_complete, placement_problem
from specdecode_operator.types import Worker
from support.operators.fleet import SimulatedWorker, Truth, workload_with

REPORT = SimulatedWorker(Truth()).report()


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
