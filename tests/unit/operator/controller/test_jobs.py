"""Training Jobs: in the caches, created once and deleted with their pods, and without the right to read them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from specdecode_operator import manifests
from specdecode_operator.controller.children import JobWriter, add_mount_problems
from specdecode_operator.controller.status import status_of
from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.errors import ClusterError, Conflict, Refused, Unavailable
from specdecode_operator.kube import informer
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import JOBS, PODS, Kind
from specdecode_operator.state.learned import RunRecord, Session
from specdecode_operator.types import Decision, Observation, Outcome, TrainingJob
from support.background import background
from support.clock import Clock
from support.operators.canary import DISTILLATION, Canary, capturing, collecting, distilling
from support.operators.fleet import DEFAULTS, decided, deployment_with, observation_with, workload_with
from support.operators.listing_api import ListingApi, synced_caches
from support.operators.statuses import conditions

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
        assert caches.workers(KEY) == (), "pods of Jobs are no workers"
        assert caches.workload(KEY) is None
        assert caches.workload(KEY, manifests.Role.router) is None


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


# A refusal is reported and retried.


def manifest(owner: str = "u1") -> dict[str, Any]:
    owners = [{"uid": owner, "controller": True}]
    return {"metadata": {"namespace": "ns", "name": "demo-distill-1", "ownerReferences": owners}}


def ended(name: str, uid: str) -> TrainingJob:
    return TrainingJob(
        name=name, uid=uid, run="0", owner_uid="u1", deleting=False, status=JobStatus(state=JobState.RUNNING)
    )


class Api:
    """API server with one Job, which may refuse everything."""

    def __init__(self) -> None:
        self.job: Mapping[str, Any] | None = None
        self.error: ClusterError | None = None
        self.creations = 0
        self.deleted: list[tuple[str, str | None]] = []

    async def create(self, kind: Kind, wanted: Mapping[str, Any]) -> None:
        self.creations += 1
        if self.error:
            raise self.error
        if self.job is not None:
            raise Conflict("it exists")
        self.job = wanted

    async def get(self, kind: Kind, namespace: str, name: str) -> Mapping[str, Any] | None:
        return self.job

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> None:
        if self.error:
            raise self.error
        self.deleted.append((name, uid))


def writer(api: Api, clock: Clock | None = None) -> JobWriter:
    return JobWriter(cast(KubeClient, api), clock or Clock())


async def test_a_job_that_exists_is_the_wanted_one_if_the_deployment_owns_it() -> None:
    api = Api()
    jobs = writer(api)
    assert await jobs.carry_out(KEY, manifest(), ()) == ""
    assert await jobs.carry_out(KEY, manifest(), ()) == ""
    api.job = manifest(owner="u2")
    assert "is not of this deployment" in await jobs.carry_out(KEY, manifest(), ())


async def test_a_refusal_is_repeated_without_a_request_until_its_pause_is_over() -> None:
    api, clock = Api(), Clock()
    api.error = Refused("post: exceeded quota", "exceeded quota")
    jobs = writer(api, clock)
    assert await jobs.carry_out(KEY, manifest(), ()) == "exceeded quota"
    clock.now = 1.0
    assert await jobs.carry_out(KEY, manifest(), ()) == "exceeded quota"
    assert api.creations == 1
    clock.now, api.error = 2.0, None
    assert await jobs.carry_out(KEY, manifest(), ()) == ""
    assert api.creations == 2


async def test_a_refusal_is_forgotten_with_its_job_and_with_its_deployment() -> None:
    api = Api()
    api.error = Refused("post: exceeded quota", "exceeded quota")
    jobs = writer(api)
    for forget in (jobs.forget, None):
        assert await jobs.carry_out(KEY, manifest(), ()) == "exceeded quota"
        if forget is None:
            assert await jobs.carry_out(KEY, None, ()) == ""
        else:
            forget(KEY)
        assert jobs._refused == {}
    assert api.creations == 2
    other = manifest()
    other["metadata"]["name"] = "demo-distill-2"
    for wanted in (manifest(), other):
        assert await jobs.carry_out(KEY, wanted, ()) == "exceeded quota"
    assert api.creations == 4, "another Job has no pause"
    assert len(jobs._refused) == 1


async def test_ended_jobs_are_deleted_by_uid_and_an_error_stops_nothing() -> None:
    api = Api()
    await writer(api).carry_out(KEY, None, (ended("a", "1"), ended("b", "2")))
    assert api.deleted == [("a", "1"), ("b", "2")]
    assert api.creations == 0
    api.error = Conflict("another uid")
    await writer(api).carry_out(KEY, None, (ended("a", "1"), ended("b", "2")))


# An operator that may not read Jobs serves, begins no run, loses none, and says which right is missing.

FORBIDDEN = (
    'jobs.batch is forbidden: User "operator" cannot list resource "jobs" in API group "batch" in the namespace "ns"'
)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ListingApi:
    monkeypatch.setattr(informer, "MIN_RETRY_SECONDS", 0.01)
    return ListingApi()


async def test_without_the_right_the_operator_starts_and_knows_why_there_are_no_jobs(api: ListingApi) -> None:
    api.errors[JOBS] = Refused(f"GET jobs: {FORBIDDEN}", FORBIDDEN)
    async with synced_caches(api) as caches:
        assert caches.jobs_problem(KEY) == FORBIDDEN
        del api.errors[JOBS]
        await asyncio.wait_for(caches.informers[JOBS.kind].synced.wait(), 10)
        assert caches.jobs_problem(KEY) == ""


@pytest.mark.parametrize(
    ("kind", "error"), [(JOBS, Unavailable("no answer")), (PODS, Refused("pods is forbidden"))], ids=["silent", "pods"]
)
async def test_it_waits_for_everything_else(kind: Kind, error: Exception, api: ListingApi) -> None:
    api.errors[kind] = error
    caches = api.caches()
    async with background(caches.run()):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(caches.wait_synced(), 0.3)


def ticked(canary: Canary, seconds: float = 5.0) -> tuple[Decision, str, str]:
    """Decide without Jobs, and return the decision, the state of the run's Job and the condition's message."""
    canary.now += seconds
    workers = tuple(pod.worker() for pod in canary.pods)
    seen = {"workload": workload_with(2), "workers": workers, "jobs_problem": FORBIDDEN}
    canary.decision, canary.session = decided(canary.deployment, canary.session, now=canary.now, **seen)
    observed = observation_with(canary.session, **seen)
    status = status_of(canary.deployment, observed, canary.decision, Outcome(), now=canary.now)
    run = status.draft.run if status.draft else None
    return canary.decision, (run.job_state or "") if run else "", conditions(status)["DraftRollout"].message


def test_a_run_is_refused_with_the_missing_right() -> None:
    canary = capturing()
    canary.command("distill")
    decision, _, message = ticked(canary)
    assert (canary.phase, decision.job) == ("Serving", None)
    assert FORBIDDEN in message
    assert decision.children, "it serves"


def test_the_condition_names_the_missing_right_before_a_run_is_wanted() -> None:
    canary = capturing()
    _, _, message = ticked(canary)
    assert message == f"no run can begin: {FORBIDDEN}"


def test_a_run_that_collects_waits_and_its_condition_names_the_missing_right() -> None:
    canary = collecting()
    canary.pods[0].captured = 100
    decision, _, message = ticked(canary)
    assert (canary.phase, decision.job) == ("Collecting", None)
    assert FORBIDDEN in message
    canary.tick()
    assert canary.phase == "Distilling", "the right was granted"


def test_a_job_that_cannot_be_read_is_not_lost() -> None:
    canary = distilling()
    canary.ticks(2)
    jobs = canary.jobs
    for _ in range(5):
        decision, state, message = ticked(canary, 300)
        assert (canary.phase, decision.job, state) == ("Distilling", None, "Refused")
        assert FORBIDDEN in message
    assert canary.record.run.losses == 0
    canary.jobs = jobs
    canary.tick()
    assert len(canary.created_jobs) == 1


def test_a_run_is_not_deleted_without_the_right_and_the_status_says_so() -> None:
    canary = distilling()
    canary.carry_out("reject")
    decision, _, _ = ticked(canary, 600)
    assert decision.job is None
    assert canary.record.undeleted_run is not None
    canary.change(distillation=DISTILLATION)
    assert canary.tick().job is not None
