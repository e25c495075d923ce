"""Which Events a look brings, and that each comes once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import DEFAULTS, deployment_with, workload_with

from specdecode_operator.api.v1alpha1 import Condition, Decision, Status
from specdecode_operator.controller.events import notices
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.session import Session
from specdecode_operator.types import Observation, Outcome, UnhealthyWorker, Worker

POD = Worker(name="p", uid="p", address="10.0.0.1", ready=True, report_problem="no answer")


def status_with(kind: str, status: Any, message: str = "m", reason: str = "R") -> Status:
    found = Condition(type=kind, status=status, reason=reason, message=message, last_transition_time="t")
    return Status(conditions=(found,))


def reasons(before: Status, after: Status) -> list[tuple[str, str]]:
    return [(notice.type, notice.reason) for notice in notices(before, after, ())]


@pytest.mark.parametrize(
    ("kind", "bad", "good"),
    [
        ("DraftCompatible", "False", "True"),
        ("ScalingLimited", "True", "False"),
        ("ReportsFresh", "False", "True"),
        ("Pinned", "False", "True"),
        ("Reconciled", "False", "True"),
    ],
)
def test_a_condition_that_turns_is_told_once(kind: str, bad: str, good: str) -> None:
    ill, well = status_with(kind, bad), status_with(kind, good)
    assert reasons(Status(), ill) == [("Warning", "R")]
    assert reasons(ill, ill) == []
    assert reasons(ill, well) == [("Normal", "R")]
    assert reasons(Status(), well) == []


def test_another_slip_is_news_and_another_number_is_not() -> None:
    one, two = (status_with("Pinned", "False", message) for message in ("chian:3", "chani:3"))
    assert len(reasons(one, two)) == 1
    three, four = (status_with("ScalingLimited", "True", message) for message in ("asks for 5", "asks for 6"))
    assert not reasons(three, four)


def test_a_condition_that_goes_is_over() -> None:
    assert reasons(status_with("Pinned", "False"), Status()) == [("Normal", "Resolved")]


def test_every_decision_is_an_event() -> None:
    words = {"time": "t", "load": "l", "before": "1", "after": "2", "reason": "because"}
    found = [Decision.model_validate({**words, "kind": kind}) for kind in ("Plan", "Replicas", "Steering")]
    told = notices(Status(), Status(), found)
    assert [notice.reason for notice in told] == ["PlanChanged", "Scaled", "SteeringChanged"]
    assert told[0].message == "l: 1 -> 2: because"


# --- the conditions behind them -------------------------------------------------------------------------------------


def looked(count: int, seconds: float, pin: str = "", worker: Worker = POD) -> list[Status]:
    """Status after every look at one silent worker."""
    deployment, memory, found = deployment_with(pin=pin), Session(), []
    for look in range(count):
        now = 1000 + look * seconds
        observed = Observation(workload=workload_with(), workers=(worker,), session=memory)
        decision, memory = decide(deployment, observed, DEFAULTS, now=now)
        found.append(status_of(deployment, observed, decision, Outcome(), now=now))
        deployment = replace(deployment, status=found[-1])
    return found


def condition(status: Status, kind: str) -> Condition | None:
    return next((found for found in status.conditions if found.type == kind), None)


def fresh(status: Status) -> str:
    found = condition(status, "ReportsFresh")
    assert found is not None
    return found.status


def test_reports_are_stale_after_a_while_and_several_looks() -> None:
    assert [fresh(status) for status in looked(4, 20)] == ["True", "True", "False", "False"]
    assert [fresh(status) for status in looked(8, 1)] == ["True"] * 8, "half a minute of bursts is nothing"
    assert [fresh(status) for status in looked(2, 60)] == ["True"] * 2, "one missed poll is nothing"


def test_stale_reports_name_the_pod_and_do_not_touch_ready() -> None:
    last = looked(4, 20)[-1]
    found = condition(last, "ReportsFresh")
    assert found is not None
    assert "pod p" in found.message
    assert "no answer" in found.message
    ready = condition(last, "Ready")
    assert ready is not None
    assert ready.status == "True"


def test_several_stale_reports_are_named_each_with_its_reason() -> None:
    memory, deployment = Session(), deployment_with()
    pods = tuple(replace(POD, name=f"p{n}", uid=f"p{n}", report_problem=f"problem {n}") for n in range(6))
    for look in range(4):
        observed = Observation(workload=workload_with(6), workers=pods, session=memory)
        decision, memory = decide(deployment, observed, DEFAULTS, now=1000 + 20 * look)
        status = status_of(deployment, observed, decision, Outcome(), now=1000 + 20 * look)
    found = condition(status, "ReportsFresh")
    assert found is not None
    assert "pod p0: problem 0; pod p1: problem 1; pod p2: problem 2; pod p3: problem 3; and 2 more" in found.message


def test_a_worker_that_is_not_ready_is_not_silent() -> None:
    found = looked(4, 20, worker=replace(POD, ready=False))
    assert [fresh(status) for status in found] == ["Unknown"] * 4


def test_the_pinned_condition_is_there_while_the_annotation_is() -> None:
    assert condition(looked(1, 5)[0], "Pinned") is None
    good, bad = (condition(looked(1, 5, pin=pin)[0], "Pinned") for pin in ("chain:2", "chian:2"))
    assert good is not None
    assert (good.status, good.reason) == ("True", "PinnedByAnnotation")
    assert bad is not None
    assert (bad.status, bad.reason) == ("False", "BadPin")
    assert "nothing is pinned" in bad.message
    assert "chian:2" in (looked(1, 5, pin="chian:2")[0].reason or ""), "the REASON column says it"


def test_status_shows_pin_and_modes_of_tasks() -> None:
    tasks = [{"name": "code", "mode": "Static"}, {"name": "chat"}, {"name": "sql"}]
    deployment = deployment_with(pin="sql=none", speculation={"tasks": tasks})
    observed = Observation(workload=workload_with(), workers=(), session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=1)
    status = status_of(deployment, observed, decision, Outcome(), now=1)
    assert {task.name: task.mode for task in status.tasks} == {"code": "Static", "chat": "Auto", "sql": "Pinned"}
    assert status.speculation is not None
    assert status.speculation.pinned == "sql=none"


# --- workers that stand out -----------------------------------------------------------------------------------------


def suspected(*pods: str, acceptance: str = "0.31") -> Status:
    deployment = deployment_with()
    observed = Observation(workload=workload_with(), workers=(), session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=1)
    message = f"first token accepted {acceptance}, usually 0.72; its peers are well"
    suspects = tuple(
        UnhealthyWorker(pod=pod, uid=pod, reason="AcceptanceCollapsed", message=message, since=0.0) for pod in pods
    )
    return status_of(deployment, observed, replace(decision, suspects=suspects), Outcome(), now=1)


def test_a_pod_that_stands_out_is_named_and_does_not_touch_ready() -> None:
    found = condition(suspected("p1", "p2"), "WorkersAlike")
    assert found is not None
    assert (found.status, found.reason) == ("False", "AcceptanceCollapsed")
    assert "pod p1: first token accepted 0.31" in found.message
    assert "pod p2" in found.message
    ready = condition(suspected("p1"), "Ready")
    assert ready is not None
    assert ready.status == "True"


def test_another_pod_is_news_and_another_figure_is_not() -> None:
    assert reasons(suspected(), suspected("p1")) == [("Warning", "AcceptanceCollapsed")]
    assert reasons(suspected("p1"), suspected("p1", acceptance="0.29")) == []
    assert reasons(suspected("p1"), suspected("p1", "p2")) == [("Warning", "AcceptanceCollapsed")]
    assert reasons(suspected("p1", "p2"), suspected("p1")) == []
    assert reasons(suspected("p1"), suspected()) == [("Normal", "Alike")]
