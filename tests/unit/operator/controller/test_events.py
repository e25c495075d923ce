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
from specdecode_operator.types import Observation, Outcome, UnhealthyWorker, Worker
from support.operators.fleet import DEFAULTS, deployment_with, with_pin, workload_with

POD = Worker(name="p", uid="p", address="10.0.0.1", ready=True, report_problem="no answer")


def status_with(kind: str, status: Any, message: str = "m", reason: str = "R") -> Status:
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
    ill, well = status_with(kind, bad), status_with(kind, good)
    assert reasons(Status(), ill) == [("Warning", "R")]
    assert reasons(ill, ill) == []
    assert reasons(ill, well) == [("Normal", "R")]
    assert reasons(Status(), well) == []


@pytest.mark.parametrize("reason", ["SpecRefused", "ChildRefused", "ObjectMissing"])
def test_stalled_is_a_warning_and_its_end_is_not(reason: str) -> None:
    stalled = status_with("Stalled", "True", "pod p: secret missing", reason)
    assert reasons(Status(), stalled) == [("Warning", reason)]
    assert reasons(stalled, stalled) == []
    assert reasons(stalled, status_with("Stalled", "True", "pod p: another secret missing", reason)) == [
        ("Warning", reason)
    ], "another message is news"
    (over,) = event_notices(stalled, Status(), ())
    assert (over.type, over.reason) == ("Normal", "Resolved")
    assert over.message == f"Stalled with reason {reason} is over"


@pytest.mark.parametrize("reason", ["ImageNotPulled", "WorkerFailing"])
def test_a_retry_of_the_same_pods_is_no_event(reason: str) -> None:
    pull, back_off = (status_with("Stalled", "True", f"pod p: {text}", reason) for text in ("pull", "back-off"))
    assert reasons(pull, back_off) == []
    assert reasons(pull, status_with("Stalled", "True", "pod q: pull", reason)) == [("Warning", reason)]


def test_available_is_an_event_only_when_it_is_lost_or_regained() -> None:
    lost, served = status_with("Available", "False"), status_with("Available", "True")
    assert reasons(Status(), lost) == [], "a new deployment has no worker yet"
    assert reasons(served, lost) == [("Warning", "R")]
    assert reasons(lost, lost) == []
    assert reasons(lost, served) == [("Normal", "R")]
    assert reasons(served, status_with("Available", "False", reason="ScaledToZero")) == [], "a user asked for it"


def test_another_refusal_is_an_event_and_another_number_is_not() -> None:
    one, two = (status_with("Pinned", "False", message) for message in ("chian:3", "chani:3"))
    assert len(reasons(one, two)) == 1
    three, four = (status_with("ScalingLimited", "True", message) for message in ("asks for 5", "asks for 6"))
    assert not reasons(three, four)


def test_an_absent_condition_is_resolved() -> None:
    assert reasons(status_with("Pinned", "False"), Status()) == [("Normal", "Resolved")]


def test_every_decision_is_an_event() -> None:
    words = {"time": "t", "load": "l", "before": "1", "after": "2", "reason": "because"}
    decisions = [Decision.model_validate({**words, "kind": kind}) for kind in ("Plan", "Replicas", "Steering")]
    events = event_notices(Status(), Status(), decisions)
    assert [event.reason for event in events] == ["PlanChanged", "Scaled", "SteeringChanged"]
    assert events[0].message == "l: 1 -> 2: because"


# Stale reports and pins


def looked(count: int, seconds: float, pin: str = "", worker: Worker = POD) -> list[Status]:
    """Return the status after each of several reconciles with one silent worker."""
    deployment, memory, statuses = with_pin(deployment_with(), pin or None), Session(), []
    for look in range(count):
        now = 1000 + look * seconds
        observed = Observation(workload=workload_with(), workers=(worker,), session=memory)
        decision, memory = decide(deployment, observed, DEFAULTS, now=now)
        statuses.append(status_of(deployment, observed, decision, Outcome(), now=now))
        deployment = replace(deployment, status=statuses[-1])
    return statuses


def condition(status: Status, kind: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)


def test_stale_reports_name_the_pod_and_do_not_touch_ready() -> None:
    last = looked(4, 20)[-1]
    shown = condition(last, "ReportsFresh")
    assert "pod p" in shown.message
    assert "no answer" in shown.message
    ready = condition(last, "Ready")
    assert ready.status == "True"


def test_several_stale_reports_are_named_each_with_its_reason() -> None:
    memory, deployment = Session(), deployment_with()
    pods = tuple(replace(POD, name=f"p{n}", uid=f"p{n}", report_problem=f"problem {n}") for n in range(6))
    for look in range(4):
        observed = Observation(workload=workload_with(6), workers=pods, session=memory)
        decision, memory = decide(deployment, observed, DEFAULTS, now=1000 + 20 * look)
        status = status_of(deployment, observed, decision, Outcome(), now=1000 + 20 * look)
    shown = condition(status, "ReportsFresh")
    assert "pod p0: problem 0; pod p1: problem 1; pod p2: problem 2; pod p3: problem 3; and 2 more" in shown.message


def test_pinned_exists_while_there_is_a_pin() -> None:
    assert condition(looked(1, 5)[0], "Pinned") is None
    good, bad = (condition(looked(1, 5, pin=pin)[0], "Pinned") for pin in ("chain:2", "chain:17"))
    assert (good.status, good.reason) == ("True", "PinnedBySpec")
    assert (bad.status, bad.reason) == ("False", "BadPin")
    assert "nothing is pinned" in bad.message
    assert "chain:17" in (looked(1, 5, pin="chain:17")[0].reason or ""), "the REASON column says it"


def test_status_shows_pin_and_modes_of_tasks() -> None:
    tasks = [{"name": "code", "mode": "Static"}, {"name": "chat"}, {"name": "sql"}]
    deployment = with_pin(deployment_with(speculation={"tasks": tasks}), None, sql="none")
    observed = Observation(workload=workload_with(), workers=(), session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=1)
    status = status_of(deployment, observed, decision, Outcome(), now=1)
    assert {task.name: task.mode for task in status.tasks} == {"code": "Static", "chat": "Auto", "sql": "Pinned"}
    assert status.speculation.pinned == "sql=none"


# Outliers


def suspected(*pods: str, acceptance: str = "0.31") -> Status:
    deployment = deployment_with()
    observed = Observation(workload=workload_with(), workers=(), session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=1)
    message = f"first token accepted {acceptance}, usually 0.72; its peers are well"
    suspects = tuple(UnhealthyWorker(pod, "AcceptanceCollapsed", message) for pod in pods)
    decision = replace(decision, health=replace(decision.health, unhealthy=suspects))
    return status_of(deployment, observed, decision, Outcome(), now=1)


def test_an_outlier_is_named_and_does_not_touch_ready() -> None:
    shown = condition(suspected("p1", "p2"), "WorkersHealthy")
    assert (shown.status, shown.reason) == ("False", "AcceptanceCollapsed")
    assert "pod p1: first token accepted 0.31" in shown.message
    assert "pod p2" in shown.message
    ready = condition(suspected("p1"), "Ready")
    assert ready.status == "True"


def test_another_unhealthy_pod_is_an_event_and_another_figure_is_not() -> None:
    assert reasons(suspected(), suspected("p1")) == [("Warning", "AcceptanceCollapsed")]
    assert reasons(suspected("p1"), suspected("p1", acceptance="0.29")) == []
    assert reasons(suspected("p1"), suspected("p1", "p2")) == [("Warning", "AcceptanceCollapsed")]
    assert reasons(suspected("p1", "p2"), suspected("p1")) == []
    assert reasons(suspected("p1"), suspected()) == [("Normal", "Healthy")]
