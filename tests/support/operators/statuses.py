"""Statuses built from literals, and their conditions as tests compare them."""

from __future__ import annotations

from typing import Any, Literal

from specdecode_operator.api.v1alpha1 import Condition, Status
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.learned import Session
from specdecode_operator.types import ChildProblem, Deployment, Observation, Outcome, Worker, Workload
from support.operators.fleet import DEFAULTS, deployment_with


def pod(name: str = "p", **fields: Any) -> Worker:
    return Worker(**{"name": name, "uid": name, "address": "10.0.0.1", "ready": False, **fields})


def status_with(
    workload: Workload | None = None,
    *workers: Worker,
    outcome: Outcome | None = None,
    deployment: Deployment | None = None,
    now: float = 1000,
    **spec: Any,
) -> Status:
    deployment = deployment or deployment_with(**spec)
    observed = Observation(workload=workload, workers=workers, session=Session())
    decision, _ = decide(deployment, observed, DEFAULTS, now=now)
    return status_of(deployment, observed, decision, outcome or Outcome(), now=now)


def refused(
    kind: str, name: str, message: str, reason: Literal["NotOwned", "Refused", "Unavailable"] = "Refused"
) -> Outcome:
    return Outcome(problems=(ChildProblem(kind, name, reason, message),))


def conditions(status: Status) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions}


def states(status: Status) -> dict[str, tuple[str, str]]:
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


def kstatus(status: Status, generation: int = 1) -> str:
    """Return the result of kstatus for a custom resource: checkGenericProperties and then the Ready condition."""
    if (status.observed_generation or 0) != generation:
        return "InProgress"
    for condition in status.conditions:
        if condition.type == "Reconciling" and condition.status == "True":
            return "InProgress"
        if condition.type == "Stalled" and condition.status == "True":
            return "Failed"
    return "Current" if states(status).get("Ready", ("True", ""))[0] == "True" else "InProgress"
