"""Series of a deployment on the operator's /metrics, and that they are removed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY

from specdecode_operator import metrics
from specdecode_operator.controller.status import failed_status
from specdecode_operator.decision.plan import scaled
from specdecode_operator.types import Decision, Figures, Observation, TaskFigures
from support.operators.fleet import Loop, Truth, loop_over, with_pin, workload_with
from support.operators.statuses import status_after

KEY = ("ns", "demo")
TASK_SERIES = ("acceptance_rate", "accepted_length", "speedup", "ttft_seconds", "itl_seconds")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    metrics.forget(*KEY)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"namespace": "ns", "name": "demo", **labels})


def record(loop: Loop, decision: Decision) -> None:
    observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
    metrics.record(loop.deployment, observed, decision, status_after(loop, decision))


def recorded(loop: Loop, polls: int) -> None:
    for _ in range(polls):
        record(loop, loop.poll())


def test_figures_of_a_deployment_are_exported() -> None:
    recorded(loop_over(Truth(chances=[0.8] * 5), explore=0.1, speculation={"mode": "Static"}), 14)
    assert value("specdecode_acceptance_rate") == pytest.approx(0.65, abs=0.05)
    assert value("specdecode_accepted_length") == pytest.approx(2.95, abs=0.15)
    assert value("specdecode_first_token_acceptance") == pytest.approx(0.8, abs=0.05)
    assert (value("specdecode_speedup") or 0) > 1
    assert value("specdecode_depth") == 3
    assert value("specdecode_desired_replicas") == 1
    assert value("specdecode_condition", condition="Ready") == 1
    assert value("specdecode_wanted_replicas") is None, "there is no spec.scaling"


def test_desired_replicas_are_exported_for_an_external_autoscaler() -> None:
    """With another owner the operator does not set replicas. It exports what it would set, within the bounds."""
    loop = loop_over(scaling={"owner": "External", "maxReplicas": 3})
    decision = loop.poll()
    decision = replace(decision, scale=replace(decision.scale, desired=3))
    record(loop, decision)
    assert decision.scale.replicas == 1
    assert value("specdecode_desired_replicas") == 3


def test_decisions_are_counted_by_reason() -> None:
    recorded(loop_over(Truth(chances=[0.02] * 5)), 12)
    assert (value("specdecode_operator_plan_changes_total") or 0) >= 1
    assert value("specdecode_operator_decisions_total", kind="Plan", reason="loses") == 1
    assert (value("specdecode_realised_gain_ratio") or 0) > 0.05, "of the last of two steps down"


def test_every_decision_has_a_cause() -> None:
    loop = loop_over(Truth(chances=[0.98] * 5), explore=0.1)
    assert {change.cause for change in loop.polls(30).shown.history} == {"gain"}
    loop.deployment = loop_over(speculation={"depth": {"max": 1, "initial": 1}}).deployment
    assert {change.cause for change in loop.poll().changes} == {"bounds"}
    loop.deployment = with_pin(loop.deployment, "chain:1")
    assert {change.cause for change in loop.poll().changes if change.kind == "Steering"} == {"pin"}
    changes = [scaled(1, after, "m", "r", 0.0) for after in (2, 0)]
    assert [change and change.cause for change in changes] == ["up", "down"]


def test_the_series_of_an_absent_condition_is_removed() -> None:
    loop = loop_over()
    loop.deployment = with_pin(loop.deployment, "chain:2")
    recorded(loop, 1)
    assert value("specdecode_condition", condition="Pinned") == 1
    loop.deployment = with_pin(loop.deployment, None)
    recorded(loop, 1)
    assert value("specdecode_condition", condition="Pinned") is None


@pytest.mark.parametrize(
    "forget", [lambda: metrics.forget(*KEY), metrics.forget_all], ids=["deleted", "not the leader"]
)
def test_without_a_deployment_or_leadership_there_are_no_series(forget: Callable[[], None]) -> None:
    recorded(loop_over(Truth(chances=[0.02] * 5)), 12)
    metrics.REPORTS_FAILED.labels("timeout").inc()
    forget()
    left = [s for family in REGISTRY.collect() for s in family.samples if s.labels.get("name") == "demo"]
    assert not left
    assert REGISTRY.get_sample_value("specdecode_operator_reports_failed_total", {"reason": "timeout"})


def record_figures(loop: Loop, **figures: Any) -> None:
    """Record one reconcile with these measurements."""
    values = {"running": 1, "waiting": 0, "tokens_per_second": 9, "synthetic": False, **figures}
    decision = loop.poll()
    record(loop, replace(decision, shown=replace(decision.shown, figures=Figures(**values))))


def test_a_refused_spec_is_exported() -> None:
    loop = loop_over()
    recorded(loop, 1)
    assert value("specdecode_condition", condition="Ready") == 1
    assert value("specdecode_condition", condition="Stalled") is None
    metrics.record_failure(KEY, failed_status(loop.deployment.status, 2, "SpecRefused", "spec.x: no", now=loop.now))
    assert value("specdecode_condition", condition="Ready") == 0
    assert value("specdecode_condition", condition="Stalled") == 1
    recorded(loop, 1)
    assert value("specdecode_condition", condition="Stalled") is None


TASKS = {"tasks": [{"name": "code"}, {"name": "chat"}]}


def test_tasks_have_series_of_their_own() -> None:
    code = TaskFigures(acceptance_rate=0.6, accepted_length=2.8, ttft_seconds=0.12, itl_seconds=0.012, speedup=1.4)
    record_figures(loop_over(speculation=TASKS), tasks={"code": code, "unknown": code})
    exported = {name: value(f"specdecode_task_{name}", task="code") for name in TASK_SERIES}
    assert exported == dict(zip(TASK_SERIES, (0.6, 2.8, 1.4, 0.12, 0.012), strict=True))
    assert value("specdecode_task_speedup", task="unknown") is None, "names of tasks come from the spec alone"


def test_series_of_tasks_that_are_idle_or_removed_end() -> None:
    loop = loop_over(speculation=TASKS)
    measured = TaskFigures(ttft_seconds=0.12, speedup=1.4)
    record_figures(loop, tasks={"code": measured, "chat": measured})
    record_figures(loop, tasks={"code": TaskFigures(ttft_seconds=0.2)})
    assert value("specdecode_task_ttft_seconds", task="code") == 0.2
    assert value("specdecode_task_speedup", task="code") is None, "an old figure would keep an alert firing"
    assert value("specdecode_task_ttft_seconds", task="chat") is None
    loop.deployment = loop_over(speculation={"tasks": [{"name": "chat"}]}).deployment
    record_figures(loop, tasks={"chat": measured})
    assert value("specdecode_task_ttft_seconds", task="code") is None
    assert value("specdecode_task_ttft_seconds", task="chat") == 0.12


def test_the_number_of_task_series_is_bounded() -> None:
    names = [f"t{index}" for index in range(7)]
    loop = loop_over(speculation={"tasks": [{"name": name} for name in names]})
    record_figures(loop, tasks={name: TaskFigures(speedup=1.0) for name in [*names, "other", "more"]})
    series = [s for f in REGISTRY.collect() for s in f.samples if s.name == "specdecode_task_speedup"]
    assert len([sample for sample in series if sample.labels["name"] == "demo"]) == 8


def test_objectives_are_exported_in_seconds() -> None:
    loop = loop_over(speculation={"objective": {"ttft": "300ms"}})
    recorded(loop, 1)
    assert value("specdecode_objective_seconds", latency="ttft") == 0.3
    assert value("specdecode_objective_seconds", latency="itl") is None
    loop.deployment = loop_over().deployment
    recorded(loop, 1)
    assert value("specdecode_objective_seconds", latency="ttft") is None


def test_device_hours_saved_may_fall() -> None:
    loop = loop_over()
    for seconds in (7200.0, 3600.0):
        record_figures(loop, saved_device_seconds=seconds)
        assert value("specdecode_device_hours_saved") == seconds / 3600


def test_reasons_of_failed_reports_exist_from_the_start() -> None:
    """A counter that appears with its first failure has no increase that an alert could see."""
    for reason in get_args(metrics.CallFailure):
        assert REGISTRY.get_sample_value("specdecode_operator_reports_failed_total", {"reason": reason}) is not None
        assert REGISTRY.get_sample_value("specdecode_operator_push_failed_total", {"reason": reason}) is not None


def test_a_scrape_of_one_name_returns_its_series_alone() -> None:
    metrics.DEPTH.set(KEY, 3)
    metrics.SPEEDUP.set(KEY, 2)
    families = list(REGISTRY.restricted_registry(["specdecode_depth"]).collect())
    assert [family.name for family in families] == ["specdecode_depth"]
    assert [family.type for family in families] == ["gauge"]
    samples = [sample for sample in families[0].samples if sample.labels["name"] == "demo"]
    assert [(sample.labels, sample.value) for sample in samples] == [({"namespace": "ns", "name": "demo"}, 3)]
    metrics.DEPTH.set(KEY, None)
    metrics.DEPTH.set(KEY, None)
    assert value("specdecode_depth") is None
