"""Events of decisions and of conditions that turn bad or recover; each is written once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Condition, Decision, Status
from specdecode_operator.controller.deployment_loop import event_notices
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.learned import Session
from specdecode_operator.types import Outcome, UnhealthyWorker
from support.operators.fleet import DEFAULTS, deployment_with, observation_with, with_pin, workload_with
from support.operators.statuses import conditions, next_status, pod, states


def with_condition(kind: str, status: Any, message: str = "m", reason: str = "R") -> Status:
    condition = Condition(type=kind, status=status, reason=reason, message=message, last_transition_time="t")
    return Status(conditions=(condition,))


def reasons(before: Status, after: Status) -> list[tuple[str, str]]:
    return [(notice.type, notice.reason) for notice in event_notices(before, after, ())]


@pytest.mark.parametrize(
    ("kind", "bad", "good"),
    [
        ("DraftCompatible", "False", "True"),
        ("ScalingLimited", "True", "False"),
        ("ReportsFresh", "False", "True"),
        ("Pinned", "False", "True"),
        ("WorkersHealthy", "False", "True"),
    ],
)
def test_a_condition_that_changes_has_one_event(kind: str, bad: str, good: str) -> None:
    ill, well = with_condition(kind, bad), with_condition(kind, good)
    assert reasons(Status(), ill) == [("Warning", "R")]
    assert reasons(ill, ill) == []
    assert reasons(ill, well) == [("Normal", "R")]
    assert reasons(Status(), well) == []


@pytest.mark.parametrize("reason", ["SpecRefused", "ChildRefused", "ObjectMissing"])
def test_stalled_is_a_warning_and_its_end_is_not(reason: str) -> None:
    stalled = with_condition("Stalled", "True", "pod p: secret missing", reason)
    assert reasons(Status(), stalled) == [("Warning", reason)]
    assert reasons(stalled, stalled) == []
    assert reasons(stalled, with_condition("Stalled", "True", "pod p: another secret missing", reason)) == [
        ("Warning", reason)
    ], "another message is news"
    (over,) = event_notices(stalled, Status(), ())
    assert (over.type, over.reason) == ("Normal", "Resolved")
    assert over.message == f"Stalled with reason {reason} is over"


@pytest.mark.parametrize("reason", ["ImageNotPulled", "WorkerFailing"])
def test_a_retry_of_the_same_pods_is_no_event(reason: str) -> None:
    pull, back_off = (with_condition("Stalled", "True", f"pod p: {text}", reason) for text in ("pull", "back-off"))
    assert reasons(pull, back_off) == []
    assert reasons(pull, with_condition("Stalled", "True", "pod q: pull", reason)) == [("Warning", reason)]


def test_available_is_an_event_only_when_it_is_lost_or_regained() -> None:
    lost, served = with_condition("Available", "False"), with_condition("Available", "True")
    assert reasons(Status(), lost) == [], "a new deployment has no worker yet"
    assert reasons(served, lost) == [("Warning", "R")]
    assert reasons(lost, lost) == []
    assert reasons(lost, served) == [("Normal", "R")]
    assert reasons(served, with_condition("Available", "False", reason="ScaledToZero")) == [], "a user asked for it"


def test_another_refusal_is_an_event_and_another_number_is_not() -> None:
    one, two = (with_condition("Pinned", "False", message) for message in ("chian:3", "chani:3"))
    assert len(reasons(one, two)) == 1
    three, four = (with_condition("ScalingLimited", "True", message) for message in ("asks for 5", "asks for 6"))
    assert not reasons(three, four)


def test_every_decision_is_an_event() -> None:
    words = {"time": "t", "load": "l", "before": "1", "after": "2", "reason": "because"}
    decisions = [Decision.model_validate({**words, "kind": kind}) for kind in ("Plan", "Replicas", "Steering")]
    events = event_notices(Status(), Status(), decisions)
    assert [event.reason for event in events] == ["PlanChanged", "Scaled", "SteeringChanged"]
    assert events[0].message == "l: 1 -> 2: because"


# Stale reports and pins


def test_stale_reports_are_named_each_with_its_reason_and_do_not_touch_ready() -> None:
    memory, deployment = Session(), deployment_with(replicas=6)
    pods = tuple(pod(f"p{n}", ready=True, report_problem=f"problem {n}") for n in range(6))
    for look in range(4):
        observed = observation_with(memory, workload=workload_with(6), workers=pods)
        decision, memory = decide(deployment, observed, DEFAULTS, now=1000 + 20 * look)
        status = status_of(deployment, observed, decision, Outcome(), now=1000 + 20 * look)
    message = conditions(status)["ReportsFresh"].message
    assert "pod p0: problem 0; pod p1: problem 1; pod p2: problem 2; pod p3: problem 3; and 2 more" in message
    assert states(status)["Ready"][0] == "True"


def test_pinned_exists_while_there_is_a_pin() -> None:
    none, good, bad = (next_status(with_pin(deployment_with(), pin)) for pin in (None, "chain:2", "chain:17"))
    assert "Pinned" not in states(none)
    assert states(good)["Pinned"] == ("True", "PinnedBySpec")
    assert states(bad)["Pinned"] == ("False", "BadPin")
    assert "nothing is pinned" in conditions(bad)["Pinned"].message
    assert "chain:17" in bad.reason, "the REASON column says it"


def test_status_shows_pin_and_modes_of_tasks() -> None:
    tasks = [{"name": "code", "mode": "Static"}, {"name": "chat"}, {"name": "sql"}]
    status = next_status(with_pin(deployment_with(speculation={"tasks": tasks}), None, sql="none"))
    assert {task.name: task.mode for task in status.tasks} == {"code": "Static", "chat": "Auto", "sql": "Pinned"}
    assert status.speculation.pinned == "sql=none"


# Outliers


def suspected(*pods: str, acceptance: str = "0.31") -> Status:
    deployment, observed = deployment_with(), observation_with()
    decision, _ = decide(deployment, observed, DEFAULTS, now=1)
    message = f"first token accepted {acceptance}, usually 0.72; its peers are well"
    suspects = tuple(UnhealthyWorker(pod, "AcceptanceCollapsed", message) for pod in pods)
    decision = replace(decision, health=replace(decision.health, unhealthy=suspects))
    return status_of(deployment, observed, decision, Outcome(), now=1)


def test_an_outlier_is_named_and_does_not_touch_ready() -> None:
    status = suspected("p1", "p2")
    assert states(status)["WorkersHealthy"] == ("False", "AcceptanceCollapsed")
    assert "pod p1: first token accepted 0.31" in conditions(status)["WorkersHealthy"].message
    assert "pod p2" in conditions(status)["WorkersHealthy"].message
    assert states(status)["Ready"][0] == "True"


def test_another_unhealthy_pod_is_an_event_and_another_figure_is_not() -> None:
    assert reasons(suspected(), suspected("p1")) == [("Warning", "AcceptanceCollapsed")]
    assert reasons(suspected("p1"), suspected("p1", acceptance="0.29")) == []
    assert reasons(suspected("p1"), suspected("p1", "p2")) == [("Warning", "AcceptanceCollapsed")]
    assert reasons(suspected("p1", "p2"), suspected("p1")) == []
    assert reasons(suspected("p1"), suspected()) == [("Normal", "Healthy")]
