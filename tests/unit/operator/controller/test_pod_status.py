"""Records of pods and workloads, events of pods that do not start, and resources of another version."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.controller.children import (
    deployment_of,
    mount_problem,
    status_of_resource,
    worker_of,
    workload_of,
)
from specdecode_operator.manifests import rolling_hash
from support.operators.fleet import SPEC


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "uid": "u", **metadata}, "status": status}


def resource(**fields: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": "n", "uid": "u", "generation": 3}
    return {"metadata": metadata, "spec": SPEC, **fields}


def with_novelty(value: Any) -> Any:
    """Return ``value`` with a field that no version has, in every object."""
    if isinstance(value, list):
        return [with_novelty(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {**{key: with_novelty(item) for key, item in value.items()}, "novelty": {"isDefaulted": True}}


def test_a_ready_pod_is_a_ready_worker() -> None:
    worker = worker_of(pod({"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}))
    assert (worker.address, worker.ready, worker.leaving, worker.trouble) == ("10.0.0.1", True, False, None)


@pytest.mark.parametrize("status", [{}, {"phase": "Pending"}])
def test_a_pod_without_an_address_is_not_ready(status: dict[str, Any]) -> None:
    assert (worker_of(pod(status)).address, worker_of(pod(status)).ready) == (None, False)


def test_a_deleted_or_failed_pod_is_leaving() -> None:
    assert worker_of(pod({}, deletionTimestamp="now")).leaving
    assert worker_of(pod({"phase": "Failed"})).leaving


def test_the_trouble_of_a_failing_pull_is_the_last_line_of_its_log() -> None:
    ended = {"terminated": {"message": "pulling 3 %\nerror: the disk is full: 2 GiB are missing\n"}}
    status = {
        "initContainerStatuses": [
            {"name": "pull", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
        ]
    }
    assert worker_of(pod(status)).trouble == "pull: CrashLoopBackOff: error: the disk is full: 2 GiB are missing"


@pytest.mark.parametrize(
    ("restarts", "code", "trouble"),
    [
        (0, 1, "pull: Error: no config.json in /drafts"),
        (4, 1, "pull: CrashLoopBackOff: no config.json in /drafts"),
        (0, 0, None),
    ],
)
def test_a_failed_run_is_trouble_before_the_kubelet_waits(restarts: int, code: int, trouble: str | None) -> None:
    ended = {"exitCode": code, "reason": "Error", "message": "no config.json in /drafts"}
    container = {"name": "pull", "restartCount": restarts, "state": {"terminated": ended}}
    assert worker_of(pod({"initContainerStatuses": [container]})).trouble == trouble


def test_the_duration_of_a_pull_is_that_of_its_container() -> None:
    ended = {"exitCode": 0, "startedAt": "2026-11-27T10:00:00Z", "finishedAt": "2026-11-27T10:01:30Z"}
    container = {"name": "pull", "state": {"terminated": ended}}
    assert worker_of(pod({"initContainerStatuses": [container]})).pull_seconds == 90
    assert worker_of(pod({"initContainerStatuses": [{"name": "pull", "state": {"running": {}}}]})).pull_seconds is None


def test_a_pod_without_a_node_is_not_placed_and_has_an_age() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    worker = worker_of(pod({"conditions": [condition]}, creationTimestamp="1970-01-01T00:01:40Z"))
    assert (worker.placed, worker.created_at) == (False, 100.0)
    assert worker_of(pod({"conditions": [{"type": "PodScheduled", "status": "True"}]})).placed


def test_pods_that_a_replica_set_cannot_create_are_reported() -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: small"}
    workload = {
        "metadata": {"generation": 2},
        "spec": {"replicas": 1, "template": {}},
        "status": {"conditions": [condition]},
    }
    assert workload_of(workload).replica_failure == "exceeded quota: small"
    condition["status"] = "False"
    assert workload_of(workload).replica_failure is None


def test_a_starting_container_is_no_trouble() -> None:
    status = {"containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}]}
    assert worker_of(pod(status)).trouble is None


@pytest.mark.parametrize(
    ("status", "settled"),
    [
        ({"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}, True),
        ({"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}, False),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}, False),
        ({"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1}, False),
        ({}, False),
    ],
)
def test_a_workload_is_settled_without_a_rollout_under_way(status: dict[str, Any], settled: bool) -> None:
    workload = {"metadata": {"generation": 2}, "spec": {"replicas": 1, "template": {}}, "status": status}
    assert workload_of(workload).settled == settled


def test_fields_of_a_newer_crd_are_ignored_at_every_level() -> None:
    """The API server puts the defaults of a newer CRD into resources before its operator runs."""
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    known = resource(spec=SPEC, status={"observedGeneration": 3, "conditions": [ready]})
    newer = resource(spec=with_novelty(SPEC), status=with_novelty(known["status"]))
    assert newer["spec"]["speculation"]["draft"]["novelty"]
    assert deployment_of(newer) == deployment_of(known)
    assert rolling_hash(deployment_of(newer).spec) == rolling_hash(deployment_of(known).spec)


def test_a_status_of_another_version_counts_as_empty() -> None:
    assert status_of_resource(resource(status={"observedGeneration": 3, "ready": 1})).observed_generation is None


class Events:
    """Fake client with a list of events."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = events

    async def list(self, *_: Any, fields: str) -> dict[str, Any]:
        assert fields == "involvedObject.uid=u,type=Warning"
        return {"items": list(self.events)}


def event(reason: str, message: str, **times: Any) -> dict[str, Any]:
    return {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "reason": reason, "message": message, **times}


async def problem_of(*events: dict[str, Any]) -> str | None:
    client: Any = Events(*events)
    return await mount_problem(client, "ns", "u")


async def test_the_latest_problem_is_returned() -> None:
    first = event("FailedMount", "first", lastTimestamp="2026-01-01T00:01:00Z")
    later = event("FailedCreatePodSandBox", "later", lastTimestamp=None, eventTime="2026-01-01T00:02:00.000000Z")
    series = event("FailedAttachVolume", "latest", series={"lastObservedTime": "2026-01-01T00:03:00.000000Z"})
    assert await problem_of(first, event("FailedMount", "old")) == "FailedMount: first"
    assert await problem_of(later, first) == "FailedCreatePodSandBox: later"
    assert await problem_of(later, series, first) == "FailedAttachVolume: latest"


async def test_other_warnings_are_no_problem_of_mounts() -> None:
    assert await problem_of(event("BackOff", "restarting")) is None
    assert await problem_of() is None
