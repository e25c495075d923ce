"""Status of routers, and of a deployment without workers whose routers hold requests."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.state.learned import LearnedState, ScalingState, Session
from specdecode_operator.types import Workload
from support.operators.fleet import deployment_with, workload_with
from support.operators.statuses import conditions, kstatus, next_status, states

TWO = {"router": {"replicas": 2}}


def status_with(
    routers: Workload | None, workers: Workload | None = None, *, resting: bool = False, **spec: Any
) -> Status:
    scaling = ScalingState(replicas=0, spec_replicas=1, owned=True) if resting else ScalingState()
    session = Session(learned=LearnedState(uid="u1", scaling=scaling))
    return next_status(deployment_with(**spec), session, workload=workers or workload_with(), routers=routers)


def test_without_routers_the_status_has_none() -> None:
    status = status_with(None)
    assert status.router is None
    assert "RoutersReady" not in states(status)
    assert states(status)["Ready"] == ("True", "AllWorkersAvailable")


def test_ready_waits_for_routers() -> None:
    status = status_with(workload_with(2), **TWO)
    assert states(status)["Ready"] == ("True", "AllWorkersAvailable")
    assert states(status)["RoutersReady"] == ("True", "AllRoutersReady")
    assert kstatus(status) == "Current"
    assert (status.router.ready, status.router.replicas, status.router.ready_replicas) == ("2/2", 2, 2)


@pytest.mark.parametrize(
    ("routers", "ready", "message"),
    [
        (None, "0/2", "does not exist yet"),
        (workload_with(2, ready=0, available=0), "0/2", "the Service selects the workers"),
        (workload_with(2, ready=1, available=1), "1/2", "1 are available"),
        (workload_with(1), "1/2", "1 of 2 routers are available"),
    ],
    ids=["none", "starting", "one ready", "too few"],
)
def test_routers_that_start_are_in_motion(routers: Workload | None, ready: str, message: str) -> None:
    status = status_with(routers, **TWO)
    assert states(status)["Ready"] == ("False", "RoutersStarting")
    assert states(status)["Available"] == ("True", "WorkerAvailable")
    assert kstatus(status) == "InProgress"
    assert message in conditions(status)["RoutersReady"].message
    assert status.router.ready == ready


def test_routers_that_cannot_start_stall_the_deployment() -> None:
    late = workload_with(2, ready=0, available=0, stalled='ReplicaSet "demo-router-x" has timed out progressing.')
    status = status_with(late, **TWO)
    assert states(status)["Stalled"] == ("True", "RoutersFailing")
    assert "demo-router-x" in conditions(status)["RoutersReady"].message
    assert kstatus(status) == "Failed"


def test_an_autoscaler_decides_how_many_routers_are_enough() -> None:
    autoscaled = {"router": {"replicas": 1, "autoscaled": True}}
    status = status_with(workload_with(5), **autoscaled)
    assert states(status)["RoutersReady"] == ("True", "AllRoutersReady")
    assert status.router.ready == "5/5"


def test_no_workers_of_an_idle_deployment_is_what_the_spec_wants() -> None:
    spec = {**TWO, "scaling": {"minReplicas": 0, "idleAfter": "60s"}}
    status = status_with(workload_with(2), workload_with(0), resting=True, **spec)
    assert states(status)["Ready"] == ("True", "ScaledToZero")
    assert states(status)["Available"] == ("False", "ScaledToZero")
    assert "60 s" in conditions(status)["Ready"].message
    assert "routers hold the next one" in conditions(status)["Available"].message
    assert kstatus(status) == "Current"
    assert status.reason is None, "nothing to examine"
    assert status.ready == "0/0"


@pytest.mark.parametrize(
    ("spec", "words"),
    [({"paused": True}, "while paused"), ({"speculation": {"mode": "Advisory"}}, "in mode Advisory")],
)
def test_no_start_is_promised_that_does_not_come(spec: dict[str, Any], words: str) -> None:
    status = status_with(workload_with(2), workload_with(0), resting=True, **TWO, scaling={"minReplicas": 0}, **spec)
    assert conditions(status)["Available"].message.endswith(f"no worker is started {words}")


def test_no_workers_by_hand_says_so() -> None:
    status = status_with(None, workload_with(0), replicas=0)
    assert conditions(status)["Available"].message == "spec.replicas is 0"
