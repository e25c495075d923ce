"""Actions on unhealthy workers, from literal inputs: which worker is evicted, and when it counts as replaced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from specdecode_operator import health
from specdecode_operator.health import TUNING
from specdecode_operator.state.learned import LearnedState, PodState, PodTaskState, Session
from specdecode_operator.types import Observation, Remediation, Worker
from specdecode_worker.contract import Plan, TreeShape
from support.operators.fleet import SimulatedWorker, Truth, deployment_with

PLAN = Plan(uid="u", draft="d", version=7, initial=TreeShape.chain(3), max_depth=5)
REPORT = SimulatedWorker(Truth()).report()
NOW = 1e6
LONG_AGO = NOW - TUNING.replace_after_seconds
TASK = PodTaskState(task="other", hits=10, total=100, past_hits=800, past_total=1000)


def worker(name: str, **fields: Any) -> Worker:
    return Worker(**{"name": f"pod-{name}", "uid": name, "address": name, "ready": True, "report": REPORT, **fields})


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that the remediation depends on."""

    workers: tuple[Worker, ...]
    pods: tuple[PodState, ...]
    now: float = NOW
    least_depth: int = 0
    tasks: tuple[dict[str, Any], ...] = ()
    can_replace: bool = True
    is_complete: bool = True
    recycling: str = ""
    recycled_at: float | None = None


def heal(inputs: Inputs) -> Remediation:
    served = deployment_with(
        speculation={"depth": {"min": inputs.least_depth, "max": 5}, "tasks": list(inputs.tasks)},
        workers={"recycle": "OnCollapse" if inputs.can_replace else "Never"},
    )
    return health.heal(
        served,
        Observation(workload=None, workers=inputs.workers, session=Session()),
        LearnedState(pods=inputs.pods, recycling=inputs.recycling, recycled_at=inputs.recycled_at),
        PLAN,
        is_complete=inputs.is_complete,
        now=inputs.now,
    )


def inputs(*workers: Worker, collapsed: dict[str, float], **fields: Any) -> Inputs:
    pods = tuple(
        PodState(uid=one.uid, tasks=(TASK,), pace=0.0, collapsed_since=collapsed.get(one.uid)) for one in workers
    )
    return Inputs(**{"workers": workers, "pods": pods, **fields})


def after(before: Inputs, result: Remediation, *workers: Worker, seconds: float = 5.0) -> Inputs:
    """The inputs of the next decision, with what the first one left to store."""
    return replace(
        before,
        now=before.now + seconds,
        workers=workers or before.workers,
        recycling=result.recycling,
        recycled_at=result.recycled_at,
    )


def test_a_collapsed_worker_is_reported_and_gets_the_plain_plan() -> None:
    result = heal(inputs(worker("a"), worker("b"), collapsed={"b": NOW}))
    assert [one.message for one in result.unhealthy] == ["first token accepted 0.10, usually 0.80; its peers are well"]
    assert result.own == {"b"}
    assert (result.own_plans["b"].quiet, result.own_plans["b"].version) == (True, 7)
    assert not result.recycle, "it may recover"
    bounded = heal(inputs(worker("a"), worker("b"), collapsed={"b": NOW}, least_depth=1))
    assert (len(bounded.unhealthy), bounded.own, bounded.own_plans) == (1, set(), {}), "it speculates on"
    task = {"name": "code", "depth": {"min": 1}}
    assert not heal(inputs(worker("a"), worker("b"), collapsed={"b": NOW}, tasks=(task,))).own


def test_a_blocked_eviction_is_proposed_again_and_is_no_replacement() -> None:
    """A PodDisruptionBudget refuses the first evictions; then one succeeds."""
    now = inputs(worker("a"), worker("b"), collapsed={"b": LONG_AGO})
    for _ in range(200):
        result = heal(now)
        assert (result.recycle, result.recycling, result.recycled_at) == (("pod-b",), "b", None)
        now = after(now, result)
    now = after(now, result, worker("a"), worker("b", leaving=True))
    result = heal(now)
    assert (result.recycle, result.recycling, result.recycled_at) == ((), "", now.now)


def test_a_pod_that_is_gone_at_once_is_replaced() -> None:
    now = inputs(worker("a"), worker("b"), collapsed={"b": LONG_AGO})
    now = after(now, heal(now), worker("a"), worker("c"))
    assert heal(now).recycled_at == now.now


def test_an_eviction_counts_although_it_is_not_proposed_meanwhile() -> None:
    now = inputs(worker("a"), worker("b"), collapsed={"b": LONG_AGO})
    now = after(replace(now, is_complete=False), heal(now))
    result = heal(now)
    assert (result.recycle, result.recycling) == ((), "b")
    now = after(now, result, worker("a"), worker("b", leaving=True))
    assert heal(now).recycled_at == now.now


def test_a_worker_that_recovers_is_no_longer_evicted() -> None:
    now = inputs(worker("a"), worker("b"), collapsed={"b": LONG_AGO})
    now = after(inputs(worker("a"), worker("b"), collapsed={}), heal(now))
    result = heal(now)
    assert (result.recycle, result.recycling, result.recycled_at) == ((), "", None)
    gone = after(now, result, worker("a"))
    assert heal(gone).recycled_at is None


def test_replacements_are_one_at_a_time_and_far_apart() -> None:
    both = inputs(worker("a"), worker("b"), worker("c"), collapsed={"b": LONG_AGO, "c": LONG_AGO - 1})
    assert heal(both).recycle == ("pod-c",)
    early = replace(both, recycled_at=NOW - TUNING.replace_interval_seconds + 1)
    assert heal(early).recycle == ()
    assert heal(replace(early, now=NOW + 1)).recycle == ("pod-c",)


@pytest.mark.parametrize(
    ("others", "fields", "evicts"),
    [
        ((worker("a"),), {}, True),
        ((worker("a"),), {"is_complete": False}, False),
        ((worker("a"),), {"can_replace": False}, False),
        ((), {}, False),
        ((worker("a", placed=False, ready=False, report=None),), {}, False),
        ((worker("a", leaving=True),), {}, False),
    ],
)
def test_a_ready_worker_is_evicted_only_while_others_serve(
    others: tuple[Worker, ...], fields: dict[str, Any], evicts: bool
) -> None:
    result = heal(inputs(*others, worker("b"), collapsed={"b": LONG_AGO}, **fields))
    assert (result.recycle == ("pod-b",)) is evicts


def test_an_unready_worker_may_always_be_evicted() -> None:
    broken = worker("b", ready=False)
    alone = inputs(broken, collapsed={"b": LONG_AGO}, is_complete=False, recycled_at=NOW - 1)
    assert heal(alone).recycle == ("pod-b",)
    assert heal(replace(alone, can_replace=False)).recycle == ()
    first = inputs(worker("a"), broken, collapsed={"a": LONG_AGO - 99, "b": LONG_AGO})
    assert heal(first).recycle == ("pod-b",), "it serves nothing, so it goes before one that serves"
