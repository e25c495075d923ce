"""An operator that may not read Jobs: it serves, begins no run, loses none, and says which right is missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.errors import Refused, Unavailable
from specdecode_operator.kube import informer
from specdecode_operator.kube.kinds import JOBS, PODS, Kind
from specdecode_operator.types import Decision, Observation, Outcome
from support.background import background
from support.operators.canary import DISTILLATION, Canary, capturing, collecting, distilling
from support.operators.fleet import DEFAULTS, workload_with
from support.operators.listing_api import ListingApi, synced_caches
from support.operators.statuses import conditions

FORBIDDEN = (
    'jobs.batch is forbidden: User "operator" cannot list resource "jobs" in API group "batch" in the namespace "ns"'
)
KEY = ("ns", "demo")


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
    observed = Observation(workload=workload_with(2), workers=workers, session=canary.session, jobs_problem=FORBIDDEN)
    canary.decision, canary.session = decide(canary.deployment, observed, DEFAULTS, now=canary.now)
    status = status_of(
        canary.deployment, replace(observed, session=canary.session), canary.decision, Outcome(), now=canary.now
    )
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
    canary.command("reject")
    canary.tick()
    decision, _, _ = ticked(canary, 600)
    assert decision.job is None
    assert canary.record.undeleted_run is not None
    canary.change(distillation=DISTILLATION)
    assert canary.tick().job is not None
