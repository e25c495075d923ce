"""Slow workers are detected by their past and their peers, run without speculation, and are evicted and replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator import health
from specdecode_operator.decision.learn import learn_delta
from specdecode_operator.health import TUNING, learn_pods, plain_plan, suspected
from specdecode_operator.state.learned import LearnedState, PodState, PodTaskState, Session
from specdecode_operator.telemetry.counters import Delta, Hits, Moments, RequestSums
from specdecode_operator.telemetry.counters import fleet as together
from specdecode_operator.types import Decision, Observation, Remediation, Worker
from specdecode_worker.contract import Plan, TreeShape
from specdecode_worker.server.errors import Conflict
from specdecode_worker.server.service import PlanStore
from support.operators.fleet import Fleet, SimulatedWorker, Truth, deployment_with, linear_time

GOOD, BAD = [0.8, 0.7, 0.6, 0.5, 0.4], [0.1] * 5


def fleet_of(truths: Sequence[Truth], **spec: Any) -> Fleet:
    plan = Plan(initial=TreeShape.chain(3))
    workers = {
        f"p{index}": SimulatedWorker(truth, plan=plan, seed=index, explore=0.1) for index, truth in enumerate(truths)
    }
    return Fleet(deployment_with(replicas=len(truths), **spec), workers)


def collapses(decision: Decision) -> list[str]:
    return [suspect.pod for suspect in decision.health.unhealthy if suspect.reason == "AcceptanceCollapsed"]


def test_one_of_two_that_collapses_is_reported_runs_plainly_and_recovers() -> None:
    fleet = fleet_of([Truth(chances=GOOD), Truth(chances=GOOD)])
    assert not any(collapses(decision) for decision in fleet.polls(12))
    fleet.workers["p1"].truth.chances = BAD
    decisions = fleet.polls(6)
    last = decisions[-1]
    assert collapses(last) == ["p1"], "within half a minute"
    assert not any("at-p1" in decision.pushes for decision in decisions if collapses(decision))
    suspect = last.health.unhealthy[0]
    present, usual = map(float, re.findall(r"\d\.\d\d", suspect.message))
    assert present < 0.3 < 0.7 < usual
    assert (fleet.workers["p1"].depth, fleet.workers["p1"].plan.quiet) == (0, True)
    assert fleet.workers["p0"].depth >= 2, "the other speculates on"
    first = next(cell for cell in fleet.memory.learned.acceptance if cell.depth == 1)
    assert first.hits / first.total > 0.7, "its drafts say nothing about the others'"
    fleet.workers["p1"].truth.chances = GOOD
    assert not collapses(fleet.polls(20)[-1])
    assert fleet.workers["p1"].depth >= 2
    assert not fleet.workers["p1"].plan.quiet


@pytest.mark.parametrize("count", [3, 1])
def test_a_fall_of_all_workers_is_no_outlier(count: int) -> None:
    fleet = fleet_of([Truth(chances=GOOD) for _ in range(count)])
    fleet.polls(12)
    for worker in fleet.workers.values():
        worker.truth.chances = BAD
    assert not any(collapses(decision) for decision in fleet.polls(20))


def test_a_new_pod_is_compared_with_its_peers() -> None:
    fleet = fleet_of([Truth(chances=GOOD), Truth(chances=GOOD), Truth(chances=BAD)])
    assert collapses(fleet.polls(8)[-1]) == ["p2"]


def test_another_boot_starts_afresh() -> None:
    fleet = fleet_of([Truth(chances=GOOD), Truth(chances=GOOD)])
    fleet.polls(12)
    fleet.workers["p1"].truth.chances = BAD
    fleet.polls(8)
    fresh = SimulatedWorker(Truth(chances=GOOD), plan=fleet.workers["p0"].plan, explore=0.1)
    fresh.boot_id = "boot-2"
    fleet.workers["p1"] = fresh
    assert not collapses(fleet.polls(3)[-1])


def test_a_slow_pod_is_reported_and_nothing_else() -> None:
    def slow(sequences: float, depth: int, context: float) -> float:
        return 2 * linear_time(sequences, depth, context)

    fleet = fleet_of([Truth(), Truth(), Truth(step_time=slow)])
    last = fleet.polls(30)[-1]
    assert [(suspect.pod, suspect.reason) for suspect in last.health.unhealthy] == [("p2", "SlowSteps")]
    (times,) = re.findall(r"\d\.\d", last.health.unhealthy[0].message)
    assert float(times) == pytest.approx(2, rel=0.2)
    assert not last.health.own_plans
    assert not last.health.recycle
    del fleet.workers["p0"], fleet.workers["p1"]
    assert not fleet.poll().health.unhealthy, "who is left has no peers"


def test_what_steps_cost_does_not_depend_on_which_device_ran_them() -> None:
    """Two fast devices, and one that takes three times as long and is the only one that explores: of what it alone
    timed the fleet knows what the others would take."""

    def slow(sequences: float, depth: int, context: float) -> float:
        return 3 * linear_time(sequences, depth, context)

    fleet = fleet_of([Truth(chances=GOOD), Truth(chances=GOOD), Truth(chances=GOOD, step_time=slow)])
    for name in ("p0", "p1"):
        fleet.workers[name].explore = 0.0
    fleet.polls(40)
    learned, running = fleet.memory.learned, fleet.workers["p0"].depth
    explored = {cell.draft_passes for cell in learned.costs} - {running}
    assert explored
    for depth in explored:
        known = [Moments(cell.values) for cell in learned.costs if cell.draft_passes == depth]
        mean = sum(moments.seconds for moments in known) / sum(moments.count for moments in known)
        assert mean == pytest.approx(linear_time(1, depth, 500), rel=0.15)


@pytest.mark.parametrize(("recycle", "times"), [("Never", 0), ("OnCollapse", 1)])
def test_it_is_replaced_once_where_the_spec_allows(recycle: str, times: int) -> None:
    fleet = fleet_of([Truth(chances=GOOD), Truth(chances=GOOD)], workers={"recycle": recycle})
    fleet.polls(12)
    fleet.workers["p1"].truth.chances = BAD
    decisions = fleet.polls(60)
    assert {name for decision in decisions for name in decision.health.recycle} == set(["p1"] * times)
    assert not any(decision.health.recycle for decision in decisions[:12]), "it has time to recover"
    assert fleet.memory.learned.recycled_at is None, "nothing evicted it yet"
    del fleet.workers["p1"]
    fleet.workers["p3"] = SimulatedWorker(Truth(chances=GOOD), plan=fleet.workers["p0"].plan, explore=0.1)
    assert not any(decision.health.recycle for decision in fleet.polls(10))
    assert (fleet.memory.learned.recycled_at is not None) == bool(times)


def test_a_worker_takes_the_quiet_plan_of_its_version_and_the_common_one_after() -> None:
    common = Plan(uid="u", draft="d", version=7, initial=TreeShape.chain(3), max_depth=5)
    plans = PlanStore("u", common)
    plain = plain_plan(common)
    plans.check(plain)
    assert (plain.version, plain.rows, plain.initial.nodes, plain.max_depth) == (7, (), 0, 5)
    plans.current = plain
    plans.check(common)
    with pytest.raises(Conflict, match="other content"):
        plans.check(plain.model_copy(update={"max_depth": 1}))


rates = st.lists(st.tuples(st.sampled_from(["p", "q", "r"]), st.integers(0, 400), st.integers(0, 400)), max_size=40)


@given(rates, st.sampled_from(["d", "e"]))
def test_no_history_makes_a_pod_without_misses_suspected(history: list[tuple[str, int, int]], draft: str) -> None:
    learned, now = LearnedState(draft="d"), 0.0
    for uid, hits, misses in history:
        now += 5
        delta = Delta(draft=draft, seconds=5, acceptance={("other", 1): Hits(hits, hits + misses)})
        learned = learned.model_copy(update={"pods": learn_pods(learned, [(uid, "b", delta)], now=now)})
    assert all(any(misses for name, _, misses in history if name == uid) for uid in suspected(learned))
    assert draft == "d" or not learned.pods


def test_a_collapse_is_detected_after_a_short_history_that_includes_it() -> None:
    """One of two workers collapses after 25 polls. Requests have about 40 drafts and a poll has 13, as on two
    small CPUs: requests of both together vary widely, and the short history follows the fall."""
    learned, now = LearnedState(draft="d"), 0.0
    for poll in range(60):
        now += 2
        deltas = [(uid, "b", _poll(0.5 if uid == "p1" or poll < 25 else 0.04)) for uid in ("p1", "p2")]
        learned = learned.model_copy(update={"pods": learn_pods(learned, deltas, now=now)})
        learned = learn_delta(learned, together([delta for _, _, delta in deltas], at=now, draft="d"), now=now)
        assert suspected(learned) <= ({"p2"} if poll >= 25 else set()), poll
    assert suspected(learned) == {"p2"}


def test_an_odd_batch_before_a_pause_is_one_outlier_and_no_collapse() -> None:
    learned, now = LearnedState(draft="d"), 0.0
    idle, odd = Delta(draft="d", seconds=2), replace(_poll(0.5), acceptance={("other", 1): Hits(0, 300)})
    for second in (*[_poll(0.5)] * 60, odd, *[idle] * 30, odd):
        assert not suspected(learned)
        now += 2
        deltas = [("p1", "b", _poll(0.5)), ("p2", "b", second)]
        learned = learned.model_copy(update={"pods": learn_pods(learned, deltas, now=now)})
    assert suspected(learned) == {"p2"}, "with a second batch"


def _poll(chance: float) -> Delta:
    """Return the delta of one poll: 13 drafts, and a third of a request of 40 drafts."""
    accepted = 40 * 1.6 * chance
    request = RequestSums(1, accepted, 40, accepted**2, 40 * accepted, 1600).times(1 / 3)
    hits = Hits(13 * chance, 13)
    return Delta(draft="d", seconds=2, drafts=13, acceptance={("other", 1): hits}, requests={"other": request})


# --- actions on unhealthy workers, from literal inputs --------------------------------------------------------------

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
