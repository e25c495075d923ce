"""A deployment as the API server would show it, after a simulated worker ran under the real loop for a while."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdecode_operator.controller.status import status_of
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.types import Observation, Outcome
from support.operators.fleet import Loop, workload_with

Resource = dict[str, Any]


def polled(loop: Loop, count: int) -> None:
    """Poll ``count`` times, with every status built on the one before."""
    for _ in range(count):
        decision = loop.poll()
        observed = Observation(workload=workload_with(), workers=(), session=loop.memory)
        status = status_of(loop.deployment, observed, decision, Outcome(), now=loop.now)
        loop.deployment = replace(loop.deployment, status=status)


def resource_of(loop: Loop) -> Resource:
    deployment = loop.deployment
    return {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"namespace": deployment.namespace, "name": deployment.name, "uid": "u1"},
        "spec": deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        "status": deployment.status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def remembered(loop: Loop) -> LearnedState:
    return loop.memory.learned
