"""Deletion of the folder of a run without a verdict, and the drafts that a Job keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.api.v1alpha1 import DraftLineageStatus
from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.rollout.runs import FIRST_DELETION_RETRY_SECONDS, POD_END_SECONDS, needed_drafts
from specdecode_operator.state.learned import DraftRecord
from support.operators.canary import (
    DISTILLATION,
    NEW,
    OLD,
    TRAINED,
    Canary,
    canary_with,
    distilling,
    shown,
    training,
    verdict,
)
from support.operators.fleet import deployment_with

DELETED = JobStatus(state=JobState.FAILED, completed=True)
REFUSED = JobStatus(state=JobState.FAILED, reason="Read-only file system")


def failed() -> Canary:
    """Return a deployment whose run has just failed, with its Job deleted."""
    canary = training()
    canary.end_job(JobStatus(state=JobState.OUT_OF_MEMORY, reason="OOMKilled"))
    assert (canary.phase, canary.jobs) == ("Cooldown", [])
    return canary


def deletions(canary: Canary) -> list[str]:
    return [name for name in canary.created_jobs if "-delete-" in name]


def reason_of(canary: Canary, problem: str = "") -> str:
    return str(shown(canary, problem).draft.last_run.reason)


def test_a_failed_run_is_deleted_once_when_its_pods_have_ended() -> None:
    canary = failed()
    run = canary.record.undeleted_run
    canary.tick(POD_END_SECONDS - 1)
    assert deletions(canary) == [], "its pods may still write"
    assert "is deleted after 1970-" in reason_of(canary)
    canary.tick(1)
    assert deletions(canary) == [f"demo-delete-{run.id}"]
    canary.ticks(3)
    assert len(deletions(canary)) == 1
    canary.end_job(DELETED)
    assert (canary.record.undeleted_run, canary.jobs) == (None, [])
    assert reason_of(canary) == "Job " + f"demo-distill-{run.id}: OutOfMemory: OOMKilled"
    canary.tick(10_000)
    assert len(deletions(canary)) == 1


@pytest.mark.parametrize("end", ["better", "worse", "poisoned"])
def test_a_run_that_deleted_its_text_needs_no_other_job(end: str) -> None:
    canary = training()
    canary.end_job(verdict("failed", failure="poisoned") if end == "poisoned" else verdict(end))
    assert canary.record.last_run is not None
    assert canary.record.undeleted_run is None


@pytest.mark.parametrize("how", ["document", "reject", "time", "claim", "draft", "lost"])
def test_every_other_end_of_a_job_deletes_the_run(how: str) -> None:
    canary = training()
    run = canary.record.run
    match how:
        case "document":
            canary.job_ends(verdict("failed", failure="disk-full"))
        case "reject":
            canary.command("reject")
        case "time":
            canary.now += 341 * 3600
        case "claim":
            canary.change(distillation={**DISTILLATION, "storage": {"uri": "pvc://another"}})
        case "draft":
            canary.change(speculation={"draft": {"uri": "file:///mine"}}, distillation=DISTILLATION)
        case _:
            for _ in range(3):
                canary.jobs = []
                canary.tick()
                canary.tick(150 if canary.phase == "Distilling" else 0)
                canary.tick(0)
    canary.tick()
    assert (canary.record.undeleted_run.id, canary.record.undeleted_run.claim) == (run.id, "drafts")
    canary.tick(POD_END_SECONDS)
    assert deletions(canary) == [f"demo-delete-{run.id}"]


def test_a_deletion_that_fails_is_repeated_later_and_the_status_says_why() -> None:
    canary = failed()
    canary.tick(POD_END_SECONDS)
    assert "which failed: quota" in reason_of(canary, "quota")
    canary.end_job(REFUSED)
    assert canary.jobs == []
    assert "which failed: Read-only file system" in reason_of(canary)
    canary.tick(FIRST_DELETION_RETRY_SECONDS - 10)
    assert len(deletions(canary)) == 1
    canary.tick(10)
    assert len(deletions(canary)) == 2
    canary.restart_operator()
    canary.tick()
    assert len(deletions(canary)) == 2, "another operator knows of it"
    canary.end_job(DELETED)
    assert canary.record.undeleted_run is None


def test_a_run_is_not_deleted_while_its_job_exists() -> None:
    canary = failed()
    canary.tick(POD_END_SECONDS - 1, push=False)
    run = canary.record.undeleted_run
    canary.tick(1)
    ended = replace(canary.jobs[0], name="held", run=run.id, deleting=True)
    canary.jobs = [ended]
    assert canary.tick(push=False).job is None
    canary.jobs = []
    assert canary.tick(push=False).job is not None


def test_a_new_run_trains_while_the_last_one_is_deleted() -> None:
    canary = failed()
    canary.tick(3600)
    (deletes,) = canary.jobs
    canary.command("distill")
    canary.tick()
    canary.pods[0].captured = 100
    canary.ticks(3)
    assert canary.phase == "Distilling"
    assert [job.name for job in canary.jobs] == [deletes.name, canary.created_jobs[-1]]
    canary.jobs[0] = replace(deletes, status=DELETED)
    canary.tick()
    assert canary.phase == "Distilling"
    assert [job.name for job in canary.jobs] == [canary.created_jobs[-1]]


def needed(record: DraftRecord, *uris: str, drafts: Sequence[SpecDecodeDraft] = ()) -> set[str]:
    return set(needed_drafts(deployment_with(), record, drafts, "pvc://drafts", uris))


def test_drafts_that_may_be_assigned_or_were_tried_are_needed() -> None:
    entry = DraftLineageStatus(hash="tried", time="t", outcome="RolledBack", pairs=1, reason="r")
    record = DraftRecord(
        current="current",
        previous="previous",
        candidate="candidate",
        spec_hash=OLD,
        uris={TRAINED: "x"},
        lineage=(entry,),
    )
    assert needed(record) == {"current", "previous", "candidate", OLD, TRAINED, "tried"}
    assert needed(DraftRecord(previous=None)) == set()
    assert needed(DraftRecord(), drafts=canary_with().drafts) == {NEW}


def test_drafts_that_the_spec_names_by_their_place_are_needed() -> None:
    own, others = "pvc://drafts/drafts/demo/0a1b", "pvc://drafts/drafts/other/2c3d"
    assert needed(DraftRecord(), own, f"{own}/", others, "pvc://claim/drafts/demo/4e5f", "hf://org/name") == {"0a1b"}


def test_the_job_of_a_run_keeps_the_draft_in_use() -> None:
    canary = distilling()
    job = canary.decision.job
    assert f"--keep-drafts={OLD}" in job["spec"]["template"]["spec"]["containers"][0]["command"]
