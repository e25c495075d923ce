"""Training Jobs and their pods in the caches: one list of Jobs with their states, and no workers."""

from __future__ import annotations

from typing import Any, cast

from specdecode_operator import manifests
from specdecode_operator.controller.children import add_mount_problems
from specdecode_operator.drafts.job_status import JobState
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import JOBS, PODS, Kind
from specdecode_operator.state.learned import RunRecord, Session
from specdecode_operator.types import Observation
from support.operators.fleet import DEFAULTS, deployment_with
from support.operators.listing_api import ListingApi, synced_caches

RUN = RunRecord(id="g3", started=1.0, draft_uri="embedded://d", claim="drafts")
KEY = ("ns", "demo")


def job() -> dict[str, Any]:
    made = dict(manifests.distillation_job(deployment_with(), RUN, DEFAULTS))
    metadata = {**made["metadata"], "uid": "j1", "resourceVersion": "1"}
    return {**made, "metadata": metadata, "status": {"active": 1}}


def pod(phase: str = "Running", owner: str = "j1") -> dict[str, Any]:
    metadata = {
        "name": f"demo-distill-g3-{owner}",
        "namespace": "ns",
        "uid": f"p-{owner}",
        "resourceVersion": "1",
        "labels": job()["spec"]["template"]["metadata"]["labels"],
        "ownerReferences": [{"kind": "Job", "uid": owner, "controller": True}],
    }
    return {"metadata": metadata, "spec": {"containers": [{"name": "distill"}]}, "status": {"phase": phase}}


async def test_the_state_of_a_job_comes_from_its_own_pods() -> None:
    api = ListingApi((JOBS, job()), (PODS, pod()), (PODS, pod("Failed", owner="another")))
    async with synced_caches(api) as caches:
        (only,) = caches.jobs(KEY)
        assert (only.name, only.run, only.owner_uid) == ("demo-distill-g3", "g3", "u1")
        assert only.status.state == JobState.RUNNING
        assert caches.jobs(("ns", "other")) == ()


async def test_a_pod_whose_volume_does_not_mount_is_explained_by_its_events() -> None:
    stuck = pod("Pending")
    stuck["metadata"]["creationTimestamp"] = "1970-01-01T00:01:40Z"
    stuck["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    event = {"metadata": {}, "reason": "FailedMount", "message": 'configmap "golden" not found'}
    async with synced_caches(ListingApi((JOBS, job()), (PODS, stuck))) as caches:
        (job_of_pod,) = caches.jobs(KEY)
    asked: list[str] = []

    class Events:
        async def list(self, kind: Kind, namespace: str, *, fields: str) -> dict[str, Any]:
            asked.append(fields)
            return {"items": [event]}

    observed = Observation(workload=None, workers=(), session=Session(), jobs=(job_of_pod,))
    for now, reason in ((110, ""), (120, 'FailedMount: configmap "golden" not found')):
        (after,) = (await add_mount_problems(cast(KubeClient, Events()), "ns", observed, now)).jobs
        assert (after.status.state, after.status.reason) == (JobState.PENDING, reason)
    assert asked == ["involvedObject.uid=p-j1,type=Warning"]


async def test_pods_of_jobs_are_no_workers() -> None:
    async with synced_caches(ListingApi((JOBS, job()), (PODS, pod()))) as caches:
        assert caches.workers(KEY) == ()
        assert caches.workload(KEY) is None
        assert caches.workload(KEY, manifests.Role.router) is None
