"""What the operator's /metrics says of a deployment, and that it goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fleet import Loop, Truth, loop_over, workload_with
from prometheus_client import REGISTRY

from specdecode_operator import metrics
from specdecode_operator.controller.status import status_of
from specdecode_operator.controller.workqueue import WorkQueue
from specdecode_operator.decision import history
from specdecode_operator.types import Observation, Outcome

KEY = ("ns", "demo")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    metrics.forget(*KEY)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"namespace": "ns", "name": "demo", **labels})


def recorded(loop: Loop, polls: int) -> None:
    for _ in range(polls):
        decision = loop.poll()
        observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
        status = status_of(loop.deployment, observed, decision, Outcome(), now=loop.now)
        metrics.record(loop.deployment, observed, decision, status)


def test_figures_of_a_deployment() -> None:
    recorded(loop_over(Truth(chances=[0.8] * 5), explore=0.1, speculation={"mode": "Static"}), 14)
    assert value("specdecode_acceptance_rate") == pytest.approx(0.65, abs=0.05)
    assert value("specdecode_accepted_length") == pytest.approx(2.95, abs=0.15)
    assert value("specdecode_first_token_acceptance") == pytest.approx(0.8, abs=0.05)
    assert (value("specdecode_speedup") or 0) > 1
    assert value("specdecode_depth") == 3
    assert value("specdecode_desired_replicas") == 1
    assert value("specdecode_condition", condition="Ready") == 1
    assert value("specdecode_wanted_replicas") is None, "nobody scales"


def test_an_autoscaler_is_told_what_the_operator_would_set() -> None:
    """With another owner the operator leaves the replicas and says what it would do, within the bounds."""
    loop = loop_over(scaling={"owner": "External", "maxReplicas": 3})
    observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
    decision = replace(loop.poll(), desired=3)
    status = status_of(loop.deployment, observed, decision, Outcome(), now=loop.now)
    metrics.record(loop.deployment, observed, decision, status)
    assert decision.replicas == 1
    assert value("specdecode_desired_replicas") == 3


def test_decisions_are_counted_by_reason() -> None:
    recorded(loop_over(Truth(chances=[0.02] * 5)), 12)
    assert (value("specdecode_operator_plan_changes_total") or 0) >= 1
    assert value("specdecode_operator_decisions_total", kind="Plan", reason="loses") == 1
    assert (value("specdecode_realised_gain_ratio") or 0) > 0.05, "of the last of two steps down"


def test_every_decision_says_its_cause_in_a_word() -> None:
    loop = loop_over(Truth(chances=[0.98] * 5), explore=0.1)
    assert {change.cause for change in loop.polls(30).history} == {"gain"}
    loop.deployment = loop_over(speculation={"depth": {"max": 1, "initial": 1}}).deployment
    assert {change.cause for change in loop.poll().changes} == {"bounds"}
    loop.deployment = replace(loop.deployment, pin="chain:1")
    assert {change.cause for change in loop.poll().changes if change.kind == "Steering"} == {"pin"}
    scaled = [history.scaled(1, after, "m", "r", 0.0) for after in (2, 0)]
    assert [change and change.cause for change in scaled] == ["up", "down"]


def test_a_condition_that_is_gone_takes_its_series_along() -> None:
    loop = loop_over()
    loop.deployment = replace(loop.deployment, pin="chain:2")
    recorded(loop, 1)
    assert value("specdecode_condition", condition="Pinned") == 1
    loop.deployment = replace(loop.deployment, pin="")
    recorded(loop, 1)
    assert value("specdecode_condition", condition="Pinned") is None


def test_a_deployment_that_is_gone_leaves_nothing() -> None:
    recorded(loop_over(Truth(chances=[0.02] * 5)), 12)
    metrics.forget(*KEY)
    left = [s for family in REGISTRY.collect() for s in family.samples if s.labels.get("name") == "demo"]
    assert not left


async def test_the_queue_says_how_much_waits() -> None:
    async def handle(key: tuple[str, str]) -> None:
        return None

    queue = WorkQueue(handle)
    queue.add(("ns", "a"))
    queue.add(("ns", "b"))
    assert queue.depth() == 2
