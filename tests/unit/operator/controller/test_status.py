"""Sections of status, and that status stays equal while nothing changes. test_conditions.py has the summary."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Condition, Status
from specdecode_operator.controller.status import rounded, status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.plugin.explain import explain
from specdecode_operator.state.learned import Session
from specdecode_operator.types import (
    Decision,
    Deployment,
    Figures,
    Observation,
    Outcome,
    Speed,
    TaskFigures,
    Worker,
    Workload,
)
from specdecode_worker.contract import DraftState, GuardCell, Report, StartSeconds
from support.operators.fleet import DEFAULTS, Loop, Truth, deployment_with, loop_over, workload_with


def with_shown(decision: Decision, **values: Any) -> Decision:
    return replace(decision, shown=replace(decision.shown, **values))


def status_with(
    workload: Workload | None = None,
    workers: tuple[Worker, ...] = (),
    before: Status | None = None,
    now: float = 1000,
    **spec: Any,
) -> Status:
    deployment = deployment_with(before, **spec)
    observed = Observation(workload=workload, workers=workers, session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=now)
    return status_of(deployment, observed, decision, Outcome(), now=now)


def condition(status: Status, kind: str) -> Condition:
    return next(condition for condition in status.conditions if condition.type == kind)


def pod(**fields: Any) -> Worker:
    return Worker(**{"name": "p", "uid": "p", "address": "10.0.0.1", "ready": True, **fields})


def reporting(**draft: Any) -> Worker:
    return pod(report=Report(boot_id="b", worker="p", clock_seconds=1, draft=DraftState(method="eagle3", **draft)))


def test_the_ready_column_shows_ready_and_wanted_workers() -> None:
    assert status_with().ready == "0/1"
    assert status_with(workload_with(3, ready=1, available=1), replicas=3).ready == "1/3"


def test_seconds_of_the_start_are_those_of_the_newest_ready_worker() -> None:
    def started(created: float, read: float, **fields: Any) -> Worker:
        report = Report(boot_id="b", worker="p", clock_seconds=1, start=StartSeconds(pull=1, read=read))
        return pod(created_at=created, report=report, pull_seconds=40, **fields)

    workers = (started(5, 3.25), started(4, 2), started(6, 1, ready=False), pod())
    status = status_with(workload_with(), workers)
    seconds = "pull 41.0, read 3.2, place 0.0, fuse 0.0, compile 0.0, capture 0.0, calibrate 0.0"
    assert status.start == seconds
    assert status_with(workload_with(), (), before=status).start == seconds


def test_a_slow_draft_does_not_change_ready() -> None:
    before = status_with(workload_with())
    assert before.speculation is not None
    slow = before.model_copy(update={"speculation": before.speculation.model_copy(update={"speedup": 0.7})})
    status = status_with(workload_with(), before=slow)
    assert condition(status, "SpeculationEffective").status == "False"
    assert condition(status, "Ready").status == "True"


def test_a_draft_that_does_not_fit_is_named_and_the_endpoint_stays_ready() -> None:
    problem = "tensor midlayer.self_attn.q_proj.weight has shape [576, 1152], expected [576, 1024]"
    status = status_with(workload_with(), (reporting(problem=problem),))
    draft = condition(status, "DraftCompatible")
    assert (draft.status, draft.reason) == ("False", "DraftRefused")
    assert "midlayer.self_attn.q_proj.weight" in draft.message
    assert condition(status, "Ready").status == "True"
    assert status.reason is not None
    assert "q_proj" in status.reason


def test_a_draft_that_fits_is_compatible() -> None:
    status = status_with(workload_with(), (reporting(hash="abc"),))
    assert condition(status, "DraftCompatible").status == "True"
    assert status.draft is not None
    assert status.draft.hash == "abc"


def test_a_bad_report_is_shown() -> None:
    status = status_with(workload_with(), (pod(report_problem="drafts: -1 is no count"),))
    assert "drafts: -1" in condition(status, "DraftCompatible").message


def test_one_missed_report_changes_no_condition() -> None:
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
    assert not absent & {condition.type for condition in status_with(workload_with(), **spec).conditions}
    assert absent <= {
        condition.type for condition in status_with(workload_with(), scaling={"owner": "Operator"}).conditions
    }


def test_the_scale_subresource_finds_its_pods() -> None:
    status = status_with(workload_with(2), replicas=2)
    assert status.replicas == 2
    assert status.selector == "specdecode.io/name=demo,specdecode.io/role=worker,specdecode.io/variant=stable"


def test_equal_input_gives_equal_status() -> None:
    first = status_with(workload_with(), (reporting(hash="abc"),))
    second = status_with(workload_with(), (reporting(hash="abc"),), before=first, now=5000)
    assert first == second


# Model


def test_the_model_section_has_the_revision_that_new_pods_load() -> None:
    def model(before: Status | None, uri: str, revision: str | None = None) -> Status:
        deployment = deployment_with(before, model={"uri": uri})
        observed = Observation(workload=workload_with(), workers=(), session=Session())
        decision, _ = decide(deployment, observed, DEFAULTS, now=1)
        return status_of(deployment, observed, with_shown(decision, model_revision=revision), Outcome(), now=1)

    resolved = model(None, "hf://org/name", "abc123")
    assert resolved.model is not None
    assert (resolved.model.uri, resolved.model.revision) == ("hf://org/name", "abc123")
    assert model(resolved, "hf://org/name").model == resolved.model, "a resolved revision stays"
    other = model(resolved, "hf://org/other").model
    assert other is not None
    assert other.revision is None
    pinned = model(None, "hf://org/name@v2").model
    assert pinned is not None
    assert pinned.revision == "v2"


# Measurements


def with_figures(
    before: Status,
    now: float,
    *,
    speedup: float | None = None,
    tasks: dict[str, TaskFigures] | None = None,
    saved: float | None = None,
    **speed: float,
) -> Status:
    deployment = deployment_with(before, speculation={"tasks": [{"name": name} for name in tasks or {}]})
    observed = Observation(workload=workload_with(), workers=(), session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=now)
    figures = Figures(
        running=1,
        waiting=0,
        tokens_per_second=99.4,
        synthetic=False,
        speed=Speed(**speed) if speed else None,
        speedup=speedup,
        tasks=tasks or {},
        saved_device_seconds=saved,
    )
    return status_of(deployment, observed, with_shown(decision, figures=figures), Outcome(), now=now)


def test_figures_are_rounded_and_written_only_when_changed() -> None:
    first = with_figures(Status(), 1000, acceptance_rate=0.613, accepted_length=2.81, speedup=1.37)
    assert first.speculation is not None
    measured = first.speculation
    assert (measured.acceptance_rate, measured.accepted_length, measured.speedup) == (0.6, 2.8, 1.35)
    second = with_figures(first, 2000, acceptance_rate=0.61, accepted_length=2.79, speedup=1.36)
    assert second.speculation == first.speculation, "measuredAt must not move alone"
    third = with_figures(second, 3000, acceptance_rate=0.7, accepted_length=2.8, speedup=1.35)
    assert third.speculation is not None
    assert third.speculation.measured_at != measured.measured_at


def test_an_idle_deployment_keeps_the_value_and_its_time() -> None:
    first = with_figures(Status(), 1000, acceptance_rate=0.6, accepted_length=2.8, speedup=1.35)
    assert with_figures(first, 9000).speculation == first.speculation


def test_speedup_is_updated_while_too_few_drafts_show_acceptance() -> None:
    """While a guard runs plain decoding, the gain of an hour ago must not stay."""
    first = with_figures(Status(), 1000, acceptance_rate=0.6, accepted_length=2.8, speedup=1.35)
    held = with_figures(first, 2000, speedup=1.0).speculation
    assert held is not None
    assert (held.acceptance_rate, held.speedup) == (0.6, 1.0)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.024, 0.0), (0.026, 0.05), (1.374, 1.35), (1.376, 1.4), (None, None)]
)
def test_figures_are_rounded_to_multiples_of_0_05(value: float | None, expected: float | None) -> None:
    assert rounded(value) == expected


def test_tasks_show_latency_and_speedup_and_keep_them_while_idle() -> None:
    code = TaskFigures(
        acceptance_rate=0.613, accepted_length=2.81, ttft_seconds=0.1234, itl_seconds=0.01256, speedup=1.37
    )
    first = with_figures(Status(), 1000, tasks={"code": code})
    (task,) = first.tasks
    assert (task.ttft_milliseconds, task.itl_milliseconds, task.speedup) == (120, 13, 1.35)
    assert (task.acceptance_rate, task.accepted_length) == (0.6, 2.8)
    second = with_figures(first, 2000, tasks={"code": replace(TaskFigures(), ttft_seconds=0.2)})
    assert second.tasks[0].ttft_milliseconds == 200
    assert (second.tasks[0].itl_milliseconds, second.tasks[0].speedup) == (13, 1.35), "what was not measured stays"


@pytest.mark.parametrize(
    ("seconds", "hours"), [(0.0, 0.0), (100.0, 0.03), (4444.0, 1.23), (-100.0, -0.03), (4444444.0, 1230.0)]
)
def test_device_hours_saved_are_rounded(seconds: float, hours: float) -> None:
    first = with_figures(Status(), 1000, saved=seconds)
    assert first.speculation is not None
    assert first.speculation.device_hours_saved == hours
    unknown = with_figures(first, 2000).speculation
    assert unknown is not None
    assert unknown.device_hours_saved == hours


def statuses(loop: Loop, count: int) -> list[Status]:
    """Return the status after every poll, each built on the one before, as on a cluster."""
    built: list[Status] = []
    for _ in range(count):
        before: Deployment = loop.deployment
        decision: Decision = loop.poll()
        report = loop.worker.report()
        workers = (pod(report=report),)
        observed = Observation(workload=workload_with(), workers=workers, session=loop.memory)
        status = status_of(before, observed, decision, Outcome(), now=loop.now)
        loop.deployment = replace(before, status=status)
        built.append(status)
    return built


def test_status_of_a_busy_fleet_is_written_at_most_every_half_minute() -> None:
    loop = loop_over(Truth(noise=0.2), explore=0.1, speculation={"mode": "Static"})
    built = statuses(loop, 48)[6:]
    writes = sum(one != two for one, two in pairwise(built))
    assert writes <= len(built) / 6 + 1
    assert built[-1].speculation is not None
    assert built[-1].speculation.depth == 3
    assert built[-1].speculation.speedup is not None


def test_status_of_jittering_demand_is_written_at_most_every_half_minute() -> None:
    truth = Truth(sequences=12)
    loop = loop_over(truth, scaling={"owner": "Operator", "maxReplicas": 2}, speculation={"mode": "Static"})
    built: list[Status] = []
    for waiting in [20.0, 65.0, 30.0, 80.0, 25.0] * 10:
        truth.waiting = waiting
        built += statuses(loop, 1)
    built = built[6:]
    writes = sum(one != two for one, two in pairwise(built))
    assert writes <= len(built) / 6 + 1
    assert condition(built[-1], "ScalingLimited").reason == "AtMaximum"
    assert len({status.capacity for status in built}) > 1, "capacity is updated all the same"


def test_arrivals_have_two_digits_and_stay_while_unknown() -> None:
    loop = loop_over(scaling={"owner": "Operator", "maxReplicas": 2})
    decision = loop.poll()
    observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
    nothing = Figures(running=0, waiting=0, tokens_per_second=0, synthetic=False)

    def arrivals(measured: float | None, before: Deployment) -> tuple[float | None, Deployment]:
        scale = replace(decision.scale, wanted=1, arrivals=measured)
        known = replace(decision, scale=scale, shown=replace(decision.shown, figures=nothing))
        status = status_of(before, observed, known, Outcome(), now=loop.now)
        assert status.capacity is not None
        return status.capacity.arrivals_per_second, replace(before, status=status)

    shown, after = arrivals(0.1234, loop.deployment)
    assert shown == 0.12
    assert arrivals(None, after)[0] == 0.12


def test_a_decision_is_shown_with_its_reason() -> None:
    loop = loop_over(Truth(chances=[0.05] * 5))
    status = statuses(loop, 12)[-1]
    assert status.speculation is not None
    assert status.speculation.depth == 0
    assert status.speculation.history[-1].before == "chain:3"
    assert "loses" in (status.speculation.history[0].reason)
    assert condition(status, "SpeculationEffective").reason == "PlainIsFaster"


def test_the_condition_names_the_shape_that_the_guards_suspend() -> None:
    loop = loop_over(Truth(chances=[0.9] * 5))
    statuses(loop, 12)
    report = loop.worker.report()

    def after(suppressed: bool) -> Status:
        verdicts = tuple(
            GuardCell(concurrency=row.concurrency, context=row.context, speculative=2, plain=1, suppressed=suppressed)
            for row in loop.worker.plan.rows
        )
        workers = (pod(report=report.model_copy(update={"guard": verdicts})),)
        observed = Observation(workload=workload_with(), workers=workers, session=loop.memory)
        decision, _ = decide(loop.deployment, observed, DEFAULTS, now=loop.now)
        assert decision.plan == loop.worker.plan
        return status_of(loop.deployment, observed, decision, Outcome(), now=loop.now)

    held, free = after(suppressed=True), after(suppressed=False)
    assert (held.speculation and held.speculation.depth, free.speculation and free.speculation.depth) == (0, 5)
    effective = condition(held, "SpeculationEffective")
    assert (effective.status, effective.reason) == ("False", "SuspendedByGuards")
    assert "suspend chain:5 of the plan" in effective.message
    assert condition(free, "SpeculationEffective").reason != "SuspendedByGuards"


@pytest.mark.parametrize(("dear", "reason"), [(True, "DraftingIsDear"), (False, "Faster")])
def test_drafting_that_takes_much_of_a_step_is_named_by_condition_and_explain(dear: bool, reason: str) -> None:
    """A pass takes 6 ms of a step of 20 ms and more, or 1 ms, by the steps that workers timed."""
    each = 0.006 if dear else 0.001
    loop = loop_over(Truth(chances=[0.95] * 5, step_time=lambda s, d, c: 0.02 + each * d + 0.0004 * s * (d + 1)))
    decision = loop.poll()
    for sequences in (1, 8, 4, 2):  # one number of sequences tells passes and verified tokens together only
        loop.worker.truth.sequences = sequences
        decision = loop.polls(8)
    assert decision.shown.depth
    share = each * decision.shown.depth / (0.02 + each * decision.shown.depth + 0.0004 * 2 * (decision.shown.depth + 1))
    assert decision.shown.drafting_share == pytest.approx(share, abs=0.06)
    observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
    figures = Figures(running=1, waiting=0, tokens_per_second=9, synthetic=False, speedup=1.5)
    status = status_of(loop.deployment, observed, with_shown(decision, figures=figures), Outcome(), now=loop.now)
    effective = condition(status, "SpeculationEffective")
    assert (effective.status, effective.reason) == ("True", reason)
    assert ("drafting takes over 30 % of a step" in effective.message) == dear
    spec = loop.deployment.spec.model_dump(by_alias=True, mode="json", exclude_none=True)
    resource = {"metadata": {"namespace": "n", "name": "d"}, "spec": spec, "status": status.model_dump(mode="json")}
    text = " ".join(" ".join(explain(resource, None, loop.now)).split())
    assert ("A cheaper draft of equal acceptance would gain more." in text) == dear


def test_status_and_explain_have_the_acceptance_by_context() -> None:
    loop = loop_over()
    decision = with_shown(loop.polls(4), context_rates={"other": {"<=1024": 0.612, ">8192": 0.1}})
    figures = Figures(running=1, waiting=0, tokens_per_second=9, synthetic=False)
    observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
    status = status_of(loop.deployment, observed, with_shown(decision, figures=figures), Outcome(), now=loop.now)
    assert status.speculation is not None
    assert status.speculation.acceptance_by_context == "other: 0.61 at <=1024, 0.10 at >8192"
    again = deployment_with(status)
    later = status_of(
        again, observed, with_shown(decision, figures=None, context_rates={}), Outcome(), now=loop.now + 5
    )
    assert later.speculation is not None
    assert later.speculation.acceptance_by_context == status.speculation.acceptance_by_context, "with the figures alone"
    spec = loop.deployment.spec.model_dump(by_alias=True, mode="json", exclude_none=True)
    resource = {"metadata": {"namespace": "n", "name": "d"}, "spec": spec, "status": status.model_dump(mode="json")}
    text = " ".join(" ".join(explain(resource, None, loop.now)).split())
    assert "by context, in tokens: other: 0.61 at <=1024, 0.10 at >8192." in text


def test_the_condition_says_that_no_worker_can_use_the_draft() -> None:
    loop = loop_over()
    statuses(loop, 12)
    report = loop.worker.report()

    def reason(*problems: str) -> str:
        reports = [report.model_copy(update={"draft": DraftState(method="eagle3", problem=one)}) for one in problems]
        workers = tuple(pod(uid=f"p{index}", report=each) for index, each in enumerate(reports))
        observed = Observation(workload=workload_with(), workers=workers, session=loop.memory)
        decision, _ = decide(loop.deployment, observed, DEFAULTS, now=loop.now)
        status = status_of(loop.deployment, observed, decision, Outcome(), now=loop.now)
        return condition(status, "SpeculationEffective").reason

    assert reason("the vocabulary differs") == "NoDraft"
    assert reason("the vocabulary differs", "") != "NoDraft"


def test_the_condition_says_what_the_estimates_lack_until_the_first_decision() -> None:
    effective = condition(statuses(loop_over(), 1)[-1], "SpeculationEffective")
    assert (effective.status, effective.reason) == ("Unknown", "Measuring")
    assert effective.message == (
        "acceptance rests on fewer than 20 independent drafts and fewer than 8 steps were timed;"
        " the depth stays until then"
    )
    advisory = loop_over(speculation={"mode": "Advisory"})
    assert condition(statuses(advisory, 1)[-1], "SpeculationEffective").reason == "NotMeasured", "nothing waits there"
