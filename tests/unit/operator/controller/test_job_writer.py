"""Training Jobs are created once, and deleted with their pods; a refusal is reported and retried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from specdecode_operator.controller.children import JobWriter
from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.errors import ClusterError, Conflict, Refused
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import Kind
from specdecode_operator.types import TrainingJob

KEY = ("ns", "demo")


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


def writer(api: Api, clock: list[float] | None = None) -> JobWriter:
    times = clock or [0.0]
    return JobWriter(cast(KubeClient, api), lambda: times[0])


async def test_a_job_that_exists_is_the_wanted_one_if_the_deployment_owns_it() -> None:
    api = Api()
    jobs = writer(api)
    assert await jobs.carry_out(KEY, manifest(), ()) == ""
    assert await jobs.carry_out(KEY, manifest(), ()) == ""
    api.job = manifest(owner="u2")
    assert "is not of this deployment" in await jobs.carry_out(KEY, manifest(), ())


async def test_a_refusal_is_repeated_without_a_request_until_its_pause_is_over() -> None:
    api, clock = Api(), [0.0]
    api.error = Refused("post: exceeded quota", "exceeded quota")
    jobs = writer(api, clock)
    assert await jobs.carry_out(KEY, manifest(), ()) == "exceeded quota"
    clock[0] = 1.0
    assert await jobs.carry_out(KEY, manifest(), ()) == "exceeded quota"
    assert api.creations == 1
    clock[0], api.error = 2.0, None
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
