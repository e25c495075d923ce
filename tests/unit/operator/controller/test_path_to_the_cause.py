"""A person's path to why a deployment is not ready: `kubectl get sdd`, then `kubectl specdecode explain NAME`.

Ten kinds of failure, as pods, Deployments and API server show them. The first command names the kind in its REASON
column, the second has the words of whoever knows the cause, and docs/how-to/troubleshoot.md says what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import COLUMNS, Status
from specdecode_operator.controller.children import deployment_of, worker_of
from specdecode_operator.controller.status import failed_status
from specdecode_operator.errors import SpecError
from specdecode_operator.types import Outcome
from support.kube import ROOT
from support.operators.fleet import SPEC, deployment_with, workload_with
from support.operators.statuses import conditions, explained, refused, resource_of, states, status_with

LATER = 1_900_000_000.0
STARTING = workload_with(1, ready=0, available=0)
PAGE = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text()


def pod(**status: Any) -> dict[str, Any]:
    """Return a worker pod that does not start, as the API server has it."""
    labels = {"specdecode.io/name": "demo", "specdecode.io/role": "worker"}
    metadata = {"name": "demo-worker-1", "uid": "p", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels}
    scheduled = {"type": "PodScheduled", "status": "True"}
    return {"metadata": metadata, "status": {"phase": "Pending", "conditions": [scheduled], **status}}


def waiting(reason: str, message: str, container: str = "worker", **more: Any) -> dict[str, Any]:
    kind = "initContainerStatuses" if container == "pull" else "containerStatuses"
    return pod(**{kind: [{"name": container, "state": {"waiting": {"reason": reason, "message": message}}, **more}]})


def ended(message: str, container: str = "worker") -> dict[str, Any]:
    """Return a pod whose container crashes again and again, with its termination message."""
    last = {"lastState": {"terminated": {"exitCode": 1, "message": message}}, "restartCount": 5}
    return waiting("CrashLoopBackOff", "back-off 5m0s restarting failed container", container, **last)


def of_pod(manifest: dict[str, Any], trouble: str | None = None) -> Callable[[], Status]:
    """Return the status of a deployment with this pod, which was not ready for an hour."""

    def made() -> Status:
        worker = worker_of(manifest)
        worker = replace(worker, trouble=trouble or worker.trouble)
        first = status_with(STARTING, worker, now=LATER - 3600)
        return status_with(STARTING, worker, deployment=deployment_with(first), now=LATER)

    return made


def of_outcome(outcome: Outcome) -> Callable[[], Status]:
    return lambda: status_with(STARTING, outcome=outcome)


def of_bad_spec() -> Status:
    metadata = {"namespace": "ns", "name": "demo", "uid": "u", "generation": 1}
    with pytest.raises(SpecError) as caught:
        deployment_of({"metadata": metadata, "spec": {**SPEC, "replicas": "many"}})
    return failed_status(Status(), 1, "SpecRefused", str(caught.value), now=LATER)


def verdict(**fields: Any) -> str:
    return json.dumps({"serves": False, "fits": True, "problem": "", **fields})


@dataclass(frozen=True)
class Failure:
    """One kind of failure: what REASON begins with, and the words that ``explain`` must have."""

    reason: str
    words: str
    status: Callable[[], Status]


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
FAILURES = (
    Failure("ImageNotPulled", "manifest unknown", of_pod(waiting("ImagePullBackOff", "manifest unknown"))),
    Failure(
        "ObjectMissing",
        'secret "hub" not found',
        of_pod(waiting("CreateContainerConfigError", 'secret "hub" not found')),
    ),
    Failure(
        "VolumeNotMounted", "exit status 32", of_pod(pod(), "FailedMount: MountVolume.SetUp failed: exit status 32")
    ),
    Failure("Unschedulable", "Insufficient nvidia.com/gpu", of_pod(pod(conditions=[UNSCHEDULABLE]))),
    Failure("DoesNotFit", "2 GiB too small", of_pod(ended(verdict(fits=False, problem="the GPU is 2 GiB too small")))),
    Failure("DraftRefused", "fc.weight is missing", of_pod(ended(verdict(draft_problem="fc.weight is missing")))),
    Failure("WorkerFailing", "401", of_pod(ended("hf://org/m: 401, gated: accept its license", "pull"))),
    Failure(
        "PodsNotCreated",
        "exceeded quota",
        lambda: status_with(workload_with(1, ready=0, available=0, replica_failure="pods: exceeded quota: gpus")),
    ),
    Failure(
        "ChildNotOwned",
        'Service "demo" exists',
        of_outcome(refused("Service", "demo", 'Service "demo" exists', "NotOwned")),
    ),
    Failure(
        "ChildRefused",
        "denied the request",
        of_outcome(refused("Deployment", "demo-worker", "webhook denied the request")),
    ),
    Failure("SpecRefused", "spec.replicas", of_bad_spec),
)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.reason)
def test_two_commands_lead_from_not_ready_to_the_cause(failure: Failure) -> None:
    status = failure.status()
    assert conditions(status)["Ready"].status == "False"
    columns = {column["name"]: column["jsonPath"] for column in COLUMNS if not column.get("priority")}
    assert columns["Reason"] == ".status.reason", "`kubectl get sdd` shows it without -o wide"
    assert (status.reason or "").startswith(f"{failure.reason}: ")
    motion = "Reconciling" if failure.reason == "Unschedulable" else "Stalled"
    assert states(status)[motion] == ("True", failure.reason)
    text = explained(resource_of(deployment_with(status)), None, LATER)
    problems = text[text.index("PROBLEMS") :]
    assert f"Ready is False, {failure.reason}: " in problems
    assert failure.words in problems


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.reason)
def test_the_page_says_what_to_do(failure: Failure) -> None:
    table = PAGE[PAGE.index("## It does not become Ready") : PAGE.index("## It serves without speculation")]
    assert re.search(rf"^\| [^|]*\b{failure.reason}\b[^|]*\|[^|]+\|[^|]+\|$", table, re.MULTILINE)
