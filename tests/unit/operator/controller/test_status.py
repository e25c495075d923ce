"""Sections of status, and that status stays equal while nothing changes. test_conditions.py has the summary."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.types import Decision, Figures, Speed, TaskFigures, Worker
from specdecode_worker.contract import DraftState, GuardCell, Report, StartSeconds
from support.operators.fleet import Truth, deployment_with, loop_over, with_pin, workload_with
from support.operators.statuses import (
    conditions,
    explained,
    next_status,
    pod,
    polled,
    resource_of,
    states,
    status_after,
    status_with,
)


def with_shown(decision: Decision, **values: Any) -> Decision:
    return replace(decision, shown=replace(decision.shown, **values))


def test_pins_of_any_length_fit_history_and_status() -> None:
    wide, tasks = ",".join(str(node // 4) for node in range(63)), [f"t{index}" for index in range(7)]
    loop = loop_over(speculation={"tasks": [{"name": task} for task in tasks]})
    polled(loop, 1)
    loop.deployment = with_pin(loop.deployment, wide, **dict.fromkeys(tasks, wide))
    (status,) = polled(loop, 1)
    assert status.speculation.pinned.startswith(wide)
    assert "Steering" in {decision.kind for decision in status.speculation.history}
    assert Status.model_validate(status.model_dump()) == status


def test_seconds_of_the_start_are_those_of_the_newest_ready_worker() -> None:
    def started(created: float, read: float, *, ready: bool = True) -> Worker:
        report = Report(boot_id="b", worker="p", clock_seconds=1, start=StartSeconds(pull=1, read=read))
        return pod(created_at=created, report=report, pull_seconds=40, ready=ready)

    workers = (started(5, 3.25), started(4, 2), started(6, 1, ready=False), pod(ready=True))
    status = status_with(workload_with(), *workers)
    seconds = "pull 41.0, read 3.2, place 0.0, fuse 0.0, compile 0.0, capture 0.0, calibrate 0.0"
    assert status.start == seconds
    assert status_with(workload_with(), before=status).start == seconds


def test_a_slow_draft_does_not_change_ready() -> None:
    before = status_with(workload_with())
    slow = before.model_copy(update={"speculation": before.speculation.model_copy(update={"speedup": 0.7})})
    status = status_with(workload_with(), before=slow)
    assert (states(status)["SpeculationEffective"][0], states(status)["Ready"][0]) == ("False", "True")


def test_a_draft_that_does_not_fit_is_named_and_the_endpoint_stays_ready() -> None:
    problem = "tensor midlayer.self_attn.q_proj.weight has shape [576, 1152], expected [576, 1024]"
    report = Report(boot_id="b", worker="p", clock_seconds=1, draft=DraftState(method="eagle3", problem=problem))
    status = status_with(workload_with(), pod(ready=True, report=report))
    assert states(status)["DraftCompatible"] == ("False", "DraftRefused")
    assert "midlayer.self_attn.q_proj.weight" in conditions(status)["DraftCompatible"].message
    assert states(status)["Ready"][0] == "True"
    assert "q_proj" in status.reason


def test_a_bad_report_is_shown() -> None:
    status = status_with(workload_with(), pod(ready=True, report_problem="drafts: -1 is no count"))
    assert "drafts: -1" in conditions(status)["DraftCompatible"].message


def test_one_missed_report_changes_no_condition() -> None:
    loop = loop_over()
    loop.polls(2)
    silent = pod(ready=True, report_problem="no answer")
    status = next_status(loop.deployment, loop.memory, workers=(silent,), now=loop.now + 5)
    assert states(status)["DraftCompatible"][0] == "True"


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
    assert not absent & states(status_with(workload_with(), **spec)).keys()
    assert absent <= states(status_with(workload_with(), scaling={"owner": "Operator"})).keys()


def test_the_scale_subresource_finds_its_pods() -> None:
    status = status_with(workload_with(2), replicas=2)
    assert status.replicas == 2
    assert status.selector == "specdecode.io/name=demo,specdecode.io/role=worker,specdecode.io/variant=stable"


# Model


def test_the_model_section_has_the_revision_that_new_pods_load() -> None:
    def model(before: Status | None, uri: str, revision: str | None = None) -> Status:
        return next_status(deployment_with(before, model={"uri": uri}), shown={"model_revision": revision})

    resolved = model(None, "hf://org/name", "abc123")
    assert (resolved.model.uri, resolved.model.revision) == ("hf://org/name", "abc123")
    assert model(resolved, "hf://org/name").model == resolved.model, "a resolved revision stays"
    assert model(resolved, "hf://org/other").model.revision is None
    assert model(None, "hf://org/name@v2").model.revision == "v2"


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
    return next_status(deployment, now=now, shown={"figures": figures})


def test_figures_are_rounded_and_written_only_when_changed() -> None:
    first = with_figures(Status(), 1000, acceptance_rate=0.613, accepted_length=2.81, speedup=1.37)
    measured = first.speculation
    assert (measured.acceptance_rate, measured.accepted_length, measured.speedup) == (0.6, 2.8, 1.35)
    second = with_figures(first, 2000, acceptance_rate=0.61, accepted_length=2.79, speedup=1.36)
    assert second.speculation == first.speculation, "measuredAt must not move alone"
    third = with_figures(second, 3000, acceptance_rate=0.7, accepted_length=2.8, speedup=1.35)
    assert third.speculation.measured_at != measured.measured_at
    assert with_figures(third, 9000).speculation == third.speculation, "an idle deployment keeps the value and its time"


def test_speedup_is_updated_while_too_few_drafts_show_acceptance() -> None:
    """While a guard runs plain decoding, the gain of an hour ago must not stay."""
    first = with_figures(Status(), 1000, acceptance_rate=0.6, accepted_length=2.8, speedup=1.35)
    held = with_figures(first, 2000, speedup=1.0).speculation
    assert (held.acceptance_rate, held.speedup) == (0.6, 1.0)


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
    assert first.speculation.device_hours_saved == hours
    assert with_figures(first, 2000).speculation.device_hours_saved == hours


def test_status_of_jittering_demand_is_written_at_most_every_half_minute() -> None:
    truth = Truth(sequences=12)
    loop = loop_over(truth, scaling={"owner": "Operator", "maxReplicas": 2}, speculation={"mode": "Static"})
    built: list[Status] = []
    for waiting in [20.0, 65.0, 30.0, 80.0, 25.0] * 10:
        truth.waiting = waiting
        built += polled(loop, 1)
    built = built[6:]
    writes = sum(one != two for one, two in pairwise(built))
    assert writes <= len(built) / 6 + 1
    assert conditions(built[-1])["ScalingLimited"].reason == "AtMaximum"
    assert len({status.capacity for status in built}) > 1, "capacity is updated all the same"


def test_arrivals_have_two_digits_and_stay_while_unknown() -> None:
    loop = loop_over(scaling={"owner": "Operator", "maxReplicas": 2})
    decision = loop.poll()
    nothing = Figures(running=0, waiting=0, tokens_per_second=0, synthetic=False)
    for measured in (0.1234, None):
        scale = replace(decision.scale, wanted=1, arrivals=measured)
        status = status_after(loop, with_shown(replace(decision, scale=scale), figures=nothing))
        assert status.capacity.arrivals_per_second == 0.12
        loop.deployment = replace(loop.deployment, status=status)


def test_a_decision_is_shown_with_its_reason() -> None:
    loop = loop_over(Truth(chances=[0.05] * 5))
    status = polled(loop, 12)[-1]
    assert status.speculation.depth == 0
    assert status.speculation.history[-1].before == "chain:3"
    assert "loses" in (status.speculation.history[0].reason)
    assert conditions(status)["SpeculationEffective"].reason == "PlainIsFaster"


def test_the_condition_names_the_shape_that_the_guards_suspend() -> None:
    loop = loop_over(Truth(chances=[0.9] * 5))
    polled(loop, 12)
    report = loop.worker.report()

    def after(suppressed: bool) -> Status:
        verdicts = tuple(
            GuardCell(concurrency=row.concurrency, context=row.context, speculative=2, plain=1, suppressed=suppressed)
            for row in loop.worker.plan.rows
        )
        workers = (pod(ready=True, report=report.model_copy(update={"guard": verdicts})),)
        return next_status(loop.deployment, loop.memory, workers=workers, now=loop.now)

    held, free = after(suppressed=True), after(suppressed=False)
    assert (held.speculation.depth, free.speculation.depth) == (0, 5)
    assert states(held)["SpeculationEffective"] == ("False", "SuspendedByGuards")
    assert "suspend chain:5 of the plan" in conditions(held)["SpeculationEffective"].message
    assert conditions(free)["SpeculationEffective"].reason != "SuspendedByGuards"


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
    figures = Figures(running=1, waiting=0, tokens_per_second=9, synthetic=False, speedup=1.5)
    status = status_after(loop, with_shown(decision, figures=figures))
    assert states(status)["SpeculationEffective"] == ("True", reason)
    assert ("drafting takes over 30 % of a step" in conditions(status)["SpeculationEffective"].message) == dear
    text = explained(resource_of(replace(loop.deployment, status=status)), None, loop.now)
    assert ("A cheaper draft of equal acceptance would gain more." in text) == dear


def test_status_and_explain_have_the_acceptance_by_context() -> None:
    loop = loop_over()
    decision = with_shown(loop.polls(4), context_rates={"other": {"<=1024": 0.612, ">8192": 0.1}})
    figures = Figures(running=1, waiting=0, tokens_per_second=9, synthetic=False)
    status = status_after(loop, with_shown(decision, figures=figures))
    assert status.speculation.acceptance_by_context == "other: 0.61 at <=1024, 0.10 at >8192"
    loop.deployment, loop.now = replace(loop.deployment, status=status), loop.now + 5
    later = status_after(loop, with_shown(decision, figures=None, context_rates={}))
    assert later.speculation.acceptance_by_context == status.speculation.acceptance_by_context, "with the figures alone"
    text = explained(resource_of(loop.deployment), None, loop.now)
    assert "by context, in tokens: other: 0.61 at <=1024, 0.10 at >8192." in text


def test_the_condition_says_that_no_worker_can_use_the_draft() -> None:
    loop = loop_over()
    polled(loop, 12)
    report = loop.worker.report()

    def reason(*problems: str) -> str:
        reports = [report.model_copy(update={"draft": DraftState(method="eagle3", problem=one)}) for one in problems]
        workers = tuple(pod(f"p{index}", ready=True, report=each) for index, each in enumerate(reports))
        status = next_status(loop.deployment, loop.memory, workers=workers, now=loop.now)
        return conditions(status)["SpeculationEffective"].reason

    assert reason("the vocabulary differs") == "NoDraft"
    assert reason("the vocabulary differs", "") != "NoDraft"


def test_the_condition_says_what_the_estimates_lack_until_the_first_decision() -> None:
    effective = conditions(polled(loop_over(), 1)[-1])["SpeculationEffective"]
    assert (effective.status, effective.reason) == ("Unknown", "Measuring")
    assert effective.message == (
        "acceptance rests on fewer than 20 independent drafts and fewer than 8 steps were timed;"
        " the depth stays until then"
    )
    advisory = loop_over(speculation={"mode": "Advisory"})
    effective = conditions(polled(advisory, 1)[-1])["SpeculationEffective"]
    assert effective.reason == "NotMeasured", "nothing waits there"
