"""Statuses built from literals, and their conditions as tests compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from specdecode_operator.api.v1alpha1 import Condition, Status
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.plugin.explain import explain
from specdecode_operator.state.learned import LearnedState, Session
from specdecode_operator.types import ChildProblem, Decision, Deployment, Outcome, Worker, Workload
from support.operators.fleet import DEFAULTS, Loop, deployment_with, observation_with


def pod(name: str = "p", **fields: Any) -> Worker:
    return Worker(**{"name": name, "uid": name, "address": "10.0.0.1", "ready": False, **fields})


def status_with(
    workload: Workload | None = None,
    *workers: Worker,
    before: Status | None = None,
    outcome: Outcome | None = None,
    deployment: Deployment | None = None,
    now: float = 1000,
    **spec: Any,
) -> Status:
    """Return the first status of a process, of a deployment with this spec that had the status ``before``."""
    deployment = deployment or deployment_with(before, **spec)
    return next_status(deployment, workload=workload, workers=workers, outcome=outcome, now=now)


def next_status(
    deployment: Deployment,
    session: Session | None = None,
    *,
    outcome: Outcome | None = None,
    now: float = 1000,
    shown: Mapping[str, Any] | None = None,
    **seen: Any,
) -> Status:
    """Return the status after one decision, which shows ``shown``. ``seen`` replaces fields of `observation_with`."""
    observed = observation_with(session, **seen)
    decision, _ = decide(deployment, observed, DEFAULTS, now=now)
    decision = replace(decision, shown=replace(decision.shown, **(shown or {})))
    return status_of(deployment, observed, decision, outcome or Outcome(), now=now)


def status_after(loop: Loop, decision: Decision) -> Status:
    """Return the status after a decision of a loop."""
    observed = observation_with(loop.memory)
    return status_of(loop.deployment, observed, decision, Outcome(), now=loop.now)


def polled(loop: Loop, count: int) -> list[Status]:
    """Poll ``count`` times. Return the statuses, each built on the one before, as on a cluster."""
    built = []
    for _ in range(count):
        built.append(status_after(loop, loop.poll()))
        loop.deployment = replace(loop.deployment, status=built[-1])
    return built


def resource_of(deployment: Deployment) -> dict[str, Any]:
    """Return the resource of a deployment as the API server has it."""
    return {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"namespace": deployment.namespace, "name": deployment.name, "uid": deployment.uid},
        "spec": deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        "status": deployment.status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def explained(resource: Mapping[str, Any], learned: LearnedState | None, now: float) -> str:
    """Return the text of `kubectl specdecode explain` in one line."""
    return " ".join(" ".join(explain(resource, learned, now)).split())


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
