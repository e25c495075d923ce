"""Status: what its words mean, and that it stays the same while nothing happens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fleet import DEFAULTS, Loop, Truth, deployment_with, loop_over, workload_with

from specdecode_operator.api.v1alpha1 import Condition, Status
from specdecode_operator.controller.status import failed_status, rounded, status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.session import Session
from specdecode_operator.types import (
    ChildProblem,
    Decision,
    Deployment,
    Figures,
    Observation,
    Outcome,
    Speed,
    Worker,
    Workload,
)
from specdecode_worker.contract import DraftState, Report


def told(
    workload: Workload | None = None,
    workers: tuple[Worker, ...] = (),
    outcome: Outcome | None = None,
    before: Status | None = None,
    now: float = 1000,
    **spec: Any,
) -> Status:
    deployment = deployment_with(before, **spec)
    observed = Observation(workload=workload, workers=workers, session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=now)
    return status_of(deployment, observed, decision, outcome or Outcome(), now=now)


def condition(status: Status, kind: str) -> Condition:
    return next(found for found in status.conditions if found.type == kind)


def pod(**fields: Any) -> Worker:
    return Worker(**{"name": "p", "uid": "p", "address": "10.0.0.1", "ready": True, **fields})


def reporting(**draft: Any) -> Worker:
    return pod(report=Report(boot_id="b", worker="p", clock_seconds=1, draft=DraftState(method="eagle3", **draft)))


def test_nothing_there_yet() -> None:
    status = told()
    assert condition(status, "Ready").status == "False"
    assert condition(status, "Progressing").reason == "Creating"
    assert (status.ready, status.observed_generation) == ("0/1", 1)


def test_ready_needs_one_available_worker_and_no_more() -> None:
    status = told(workload_with(3, updated=3, ready=1, available=1), replicas=3)
    assert condition(status, "Ready").status == "True"
    assert condition(status, "Progressing").status == "True"
    assert status.ready == "1/3"


def test_slow_drafts_do_not_take_the_endpoint_down() -> None:
    before = told(workload_with())
    assert before.speculation is not None
    slow = before.model_copy(update={"speculation": before.speculation.model_copy(update={"speedup": 0.7})})
    status = told(workload_with(), before=slow)
    assert condition(status, "SpeculationEffective").status == "False"
    assert condition(status, "Ready").status == "True"


def test_a_draft_that_does_not_fit_is_named_and_the_endpoint_stays_ready() -> None:
    problem = "tensor midlayer.self_attn.q_proj.weight has shape [576, 1152], expected [576, 1024]"
    status = told(workload_with(), (reporting(problem=problem),))
    found = condition(status, "DraftCompatible")
    assert (found.status, found.reason) == ("False", "DraftRefused")
    assert "midlayer.self_attn.q_proj.weight" in found.message
    assert condition(status, "Ready").status == "True"
    assert status.reason is not None
    assert "q_proj" in status.reason


def test_a_draft_that_fits() -> None:
    status = told(workload_with(), (reporting(hash="abc"),))
    assert condition(status, "DraftCompatible").status == "True"
    assert status.draft is not None
    assert status.draft.hash == "abc"


def test_a_bad_report_is_told_and_breaks_nothing() -> None:
    status = told(workload_with(), (pod(report_problem="drafts: -1 is no count"),))
    assert "drafts: -1" in condition(status, "DraftCompatible").message


def test_one_missed_report_changes_no_verdict() -> None:
    loop = loop_over()
    loop.polls(2)
    silent = Observation(workload=workload_with(), workers=(pod(report_problem="no answer"),), session=loop.memory)
    decision, _ = decide(loop.deployment, silent, DEFAULTS, now=loop.now + 5)
    status = status_of(loop.deployment, silent, decision, Outcome(), now=loop.now + 5)
    assert condition(status, "DraftCompatible").status == "True"


@pytest.mark.parametrize(
    ("spec", "absent"),
    [
        ({"speculation": {"method": "none", "draft": None}}, {"DraftCompatible", "SpeculationEffective"}),
        ({"speculation": {"mode": "Off"}}, {"SpeculationEffective"}),
        ({}, {"ScalingLimited"}),
        ({"scaling": {"owner": "External"}}, {"ScalingLimited"}),
    ],
    ids=("no method", "off", "no scaling", "external"),
)
def test_a_condition_exists_only_while_its_feature_is_in_use(spec: dict[str, Any], absent: set[str]) -> None:
    assert not absent & {found.type for found in told(workload_with(), **spec).conditions}
    assert absent <= {found.type for found in told(workload_with(), scaling={"owner": "Operator"}).conditions}


def test_a_pod_that_cannot_start_says_why() -> None:
    trouble = "pull: CrashLoopBackOff: hf://org/gated needs a token: set model.tokenSecretRef"
    status = told(workload_with(available=0, ready=0), (pod(ready=False, trouble=trouble),))
    assert condition(status, "Ready").reason == "WorkerFailing"
    assert status.reason is not None
    assert "tokenSecretRef" in status.reason


def test_what_the_api_server_refused_is_a_condition() -> None:
    found = condition(
        told(outcome=Outcome(problems=(ChildProblem("Deployment", "x", "Refused", "exceeded quota"),))), "Reconciled"
    )
    assert (found.status, found.reason) == ("False", "ApplyRefused")


def test_a_refused_spec_keeps_the_rest_of_the_status() -> None:
    before = told(workload_with())
    after = failed_status(before, 2, "SpecRefused", "spec.x: no", now=2000)
    assert condition(after, "Ready") == condition(before, "Ready")
    assert (condition(after, "Reconciled").status, after.reason) == ("False", "spec.x: no")


def test_the_scale_subresource_finds_its_pods() -> None:
    status = told(workload_with(2), replicas=2)
    assert status.replicas == 2
    assert status.selector == "specdecode.io/name=demo,specdecode.io/role=worker,specdecode.io/variant=stable"


def test_equal_input_gives_equal_status() -> None:
    first = told(workload_with(), (reporting(hash="abc"),))
    second = told(workload_with(), (reporting(hash="abc"),), before=first, now=5000)
    assert first == second


def test_transition_times_move_only_with_the_verdict() -> None:
    first = told(workload_with(available=0))
    second = told(workload_with(available=0), before=first, now=2000)
    third = told(workload_with(), before=second, now=3000)
    times = [condition(status, "Ready").last_transition_time for status in (first, second, third)]
    assert times[0] == times[1] != times[2]


# --- figures ------------------------------------------------------------------------------------------------------


def with_figures(before: Status, now: float, *, speedup: float | None = None, **speed: float) -> Status:
    deployment = deployment_with(before)
    observed = Observation(workload=workload_with(), workers=(), session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=now)
    found = Figures(
        running=1,
        waiting=0,
        tokens_per_second=99.4,
        synthetic=False,
        speed=Speed(**speed) if speed else None,
        speedup=speedup,
    )
    return status_of(deployment, observed, replace(decision, figures=found), Outcome(), now=now)


def test_figures_are_rounded_and_written_only_when_changed() -> None:
    first = with_figures(Status(), 1000, acceptance_rate=0.613, accepted_length=2.81, speedup=1.37)
    assert first.speculation is not None
    found = first.speculation
    assert (found.acceptance_rate, found.accepted_length, found.speedup) == (0.6, 2.8, 1.35)
    second = with_figures(first, 2000, acceptance_rate=0.61, accepted_length=2.79, speedup=1.36)
    assert second.speculation == first.speculation, "measuredAt must not move alone"
    third = with_figures(second, 3000, acceptance_rate=0.7, accepted_length=2.8, speedup=1.35)
    assert third.speculation is not None
    assert third.speculation.measured_at != found.measured_at


def test_idle_keeps_the_value_and_its_time() -> None:
    first = with_figures(Status(), 1000, acceptance_rate=0.6, accepted_length=2.8, speedup=1.35)
    assert with_figures(first, 9000).speculation == first.speculation


def test_speedup_goes_on_where_too_few_drafts_say_anything_of_acceptance() -> None:
    """A guard that took over must not leave the gain of an hour ago standing."""
    first = with_figures(Status(), 1000, acceptance_rate=0.6, accepted_length=2.8, speedup=1.35)
    held = with_figures(first, 2000, speedup=1.0).speculation
    assert held is not None
    assert (held.acceptance_rate, held.speedup) == (0.6, 1.0)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.024, 0.0), (0.026, 0.05), (1.374, 1.35), (1.376, 1.4), (None, None)]
)
def test_rounding(value: float | None, expected: float | None) -> None:
    assert rounded(value) == expected


def statuses(loop: Loop, count: int) -> list[Status]:
    """Status after every poll, each built on the one before, as on a cluster."""
    found: list[Status] = []
    for _ in range(count):
        before: Deployment = loop.deployment
        decision: Decision = loop.poll()
        report = loop.worker.report()
        workers = (pod(report=report),)
        observed = Observation(workload=workload_with(), workers=workers, session=loop.memory)
        status = status_of(before, observed, decision, Outcome(), now=loop.now)
        loop.deployment = replace(before, status=status)
        found.append(status)
    return found


def test_a_busy_fleet_is_written_at_most_every_half_minute() -> None:
    loop = loop_over(Truth(noise=0.2), explore=0.1, speculation={"mode": "Static"})
    found = statuses(loop, 48)[6:]
    writes = sum(one != two for one, two in pairwise(found))
    assert writes <= len(found) / 6 + 1
    assert found[-1].speculation is not None
    assert found[-1].speculation.depth == 3
    assert found[-1].speculation.speedup is not None


def test_demand_that_jitters_is_written_at_most_every_half_minute() -> None:
    truth = Truth(sequences=12)
    loop = loop_over(truth, scaling={"owner": "Operator", "maxReplicas": 2}, speculation={"mode": "Static"})
    found: list[Status] = []
    for waiting in [20.0, 65.0, 30.0, 80.0, 25.0] * 10:
        truth.waiting = waiting
        found += statuses(loop, 1)
    found = found[6:]
    writes = sum(one != two for one, two in pairwise(found))
    assert writes <= len(found) / 6 + 1
    assert condition(found[-1], "ScalingLimited").reason == "AtMaximum"
    assert len({status.capacity for status in found}) > 1, "it is told all the same"


def test_arrivals_are_told_in_two_digits_and_the_last_known_stay() -> None:
    loop = loop_over(scaling={"owner": "Operator", "maxReplicas": 2})
    decision = loop.poll()
    observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
    nothing = Figures(running=0, waiting=0, tokens_per_second=0, synthetic=False)

    def arrivals(measured: float | None, before: Deployment) -> tuple[float | None, Deployment]:
        found = replace(decision, wanted=1, arrivals=measured, figures=nothing)
        status = status_of(before, observed, found, Outcome(), now=loop.now)
        assert status.capacity is not None
        return status.capacity.arrivals_per_second, replace(before, status=status)

    told, after = arrivals(0.1234, loop.deployment)
    assert told == 0.12
    assert arrivals(None, after)[0] == 0.12


def test_a_decision_is_told_with_its_reason() -> None:
    loop = loop_over(Truth(chances=[0.05] * 5))
    status = statuses(loop, 12)[-1]
    assert status.speculation is not None
    assert status.speculation.depth == 0
    assert status.speculation.history[-1].before == "chain:3"
    assert "loses" in (status.speculation.last_decision or "")
    assert condition(status, "SpeculationEffective").reason == "PlainIsFaster"
