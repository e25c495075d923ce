"""Training runs: what is captured for one, what begins and ends it, its Jobs, and the deletion of its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.api.v1alpha1 import DraftLineageStatus
from specdecode_operator.decision.plan import capture_rules
from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.errors import SpecError
from specdecode_operator.rollout.phases import step_rollout
from specdecode_operator.rollout.runs import (
    FIRST_DELETION_RETRY_SECONDS,
    POD_END_SECONDS,
    needed_drafts,
    recovery_of,
)
from specdecode_operator.state.learned import UNUSED, DraftRecord
from specdecode_operator.state.store import draft_writes, with_writes
from specdecode_worker.contract import Artifact, CaptureRules
from support.operators.canary import (
    CANDIDATE,
    DISTILLATION,
    NEW,
    OLD,
    TRAINED,
    Canary,
    canary_with,
    capturing,
    collecting,
    distilling,
    shown,
    training,
    verdict,
)
from support.operators.fleet import deployment_with, with_pause

CLAIM = DISTILLATION["storage"]
S3 = {"uri": "s3://models/team", "secretRef": {"name": "key"}}


def rules(canary: Canary) -> CaptureRules:
    return canary.decision.plan.capture


def test_a_command_collects_and_enough_conversations_make_a_job() -> None:
    canary = collecting()
    assert canary.record.spec_hash == OLD
    canary.pods[0].captured = 99
    canary.tick()
    assert (canary.phase, canary.jobs) == ("Collecting", []), "99 of 100"
    canary.pods[1].captured = 1
    canary.tick()
    run = canary.record.run
    assert canary.phase == "Distilling"
    assert canary.created_jobs == [f"demo-distill-{run.id}"]
    canary.ticks(3)
    assert len(canary.created_jobs) == 1
    assert canary.record.run.job_uid == "job-1"
    assert canary.decision.job is None, "it is asked for until it was seen"


@pytest.mark.parametrize(("waited", "phase"), [(1800, "Cooldown"), (3600, "Serving")])
def test_a_second_run_has_a_name_and_a_folder_of_its_own(waited: float, phase: str) -> None:
    canary = training()
    canary.end_job(verdict("worse"))
    canary.tick(waited)
    assert canary.phase == phase
    canary.carry_out("distill")
    canary.pods[0].captured = 100
    canary.ticks(2)
    assert len(set(canary.created_jobs)) == 2


def test_conversations_that_the_plan_deletes_do_not_count() -> None:
    canary = capturing()
    canary.command("distill")
    decision = canary.tick(push=False)
    canary.pods[0].plan = decision.plan
    for pod in canary.pods:
        pod.captured = 50
    canary.tick(push=False)
    assert canary.phase == "Collecting", "the second worker does not follow the latest plan"
    canary.push()
    canary.tick()
    assert canary.phase == "Distilling"


def test_a_worker_that_has_not_deleted_yet_does_not_count() -> None:
    """A worker follows the plan, and deletes what it forbids a moment later."""
    canary = capturing()
    canary.session = replace(canary.session, drafts=canary.record.model_copy(update={"captures_deleted_before": 900.0}))
    canary.carry_out("distill")
    for pod in canary.pods:
        pod.captured, pod.oldest = 100, 899.0
    canary.ticks(2)
    assert canary.phase == "Collecting"
    assert canary.record.run is not None
    canary.pods[1].oldest = 900.0
    canary.tick()
    assert canary.phase == "Distilling"


def test_a_run_that_cannot_succeed_is_refused_with_the_reason() -> None:
    canary = capturing(distillation={"storage": None})
    canary.command("distill")
    decision = canary.tick()
    assert canary.phase == "Serving"
    assert "distillation.storage is absent" in canary.record.run_refusal
    assert not canary.record.is_used, "no draft is assigned"
    assert decision.changes == ()
    canary.restart_operator()
    canary.change(distillation=DISTILLATION)
    canary.tick()
    assert canary.phase == "Serving", "the old command is not carried out later"
    canary.carry_out("distill")
    assert (canary.phase, canary.record.run_refusal) == ("Collecting", "")


def test_a_missing_report_refuses_a_run() -> None:
    early = Canary(capturing().deployment, pods=[])
    early.carry_out("distill")
    assert "no worker has reported" in early.record.run_refusal


@pytest.mark.parametrize("storage", [CLAIM, S3], ids=["claim", "bucket"])
def test_a_better_draft_is_tried_and_captures_are_deleted(storage: dict[str, Any]) -> None:
    canary = training(distillation={"storage": storage})
    run = canary.record.run
    assert run.place == storage["uri"]
    canary.restart_operator()
    canary.tick()
    assert canary.record.run == run, "another operator goes on with it"
    draft = Artifact(uri=f"{run.place}/drafts/demo/{TRAINED}", hash=TRAINED)
    decision = canary.end_job(verdict(gain=0.2, draft=draft))
    record = canary.record
    assert (canary.phase, record.candidate, record.uris[TRAINED]) == ("Canary", TRAINED, draft.uri)
    assert rules(canary).delete_before == canary.now
    assert [pod.captured for pod in canary.pods] == [0, 0]
    assert record.run is None
    assert (record.last_run.outcome, record.last_run.gain_percent) == ("Better", 20.0)
    assert record.run_device_seconds == 600
    assert [job.name for job in decision.ended_jobs] == canary.created_jobs
    assert canary.jobs == []
    (change,) = decision.changes
    assert "gain +20.0 % (+15.0 to +25.0 %) over 90 conversations" in change.reason
    canary.tick()
    canary.finish_pairs(40, 0.3)
    canary.until("Cooldown")
    assert [pod.draft for pod in canary.pods] == [TRAINED, TRAINED]
    assert canary.decision.plan.assignment.stable == draft


def test_mode_direct_promotes_at_once_and_the_lineage_has_it() -> None:
    canary = training(draft_rollout={"mode": "Direct"})
    canary.end_job(verdict())
    assert (canary.phase, canary.record.current) == ("Promoting", TRAINED)
    (entry,) = canary.record.lineage
    assert (entry.hash, entry.outcome, entry.gain_percent) == (TRAINED, "Promoted", 20.0)
    canary.until("Cooldown")
    assert [pod.draft for pod in canary.pods] == [TRAINED, TRAINED]


@pytest.mark.parametrize("kind", ["worse", "inconclusive"])
def test_a_draft_that_is_not_better_ends_the_run(kind: str) -> None:
    canary = training()
    canary.end_job(verdict(kind, gain=0.01))
    record = canary.record
    assert (canary.phase, record.candidate) == ("Cooldown", "")
    assert record.runs_not_better == 1
    assert record.run_outcomes == {"NotBetter": 1}
    assert rules(canary).delete_before == canary.now, "they were used"


@pytest.mark.parametrize(
    ("status", "outcome", "words", "deletes"),
    [
        (verdict("failed", failure="poisoned", reasons=("30%",)), "Poisoned", "(poisoned): 30%", True),
        (verdict("failed", failure="disk-full", reasons=("no space",)), "Failed", "(disk-full): no space", False),
        (JobStatus(state=JobState.OUT_OF_MEMORY, reason="OOMKilled"), "Failed", "OutOfMemory: OOMKilled", False),
        (JobStatus(state=JobState.DEADLINE, reason="too long"), "Failed", "DeadlineExceeded: too long", False),
    ],
    ids=["poisoned", "disk", "memory", "deadline"],
)
def test_a_run_that_fails_says_why(status: JobStatus, outcome: str, words: str, deletes: bool) -> None:
    canary = training()
    canary.end_job(status)
    assert canary.phase == "Cooldown"
    assert canary.record.last_run.outcome == outcome
    assert words in canary.record.last_run.reason
    assert (rules(canary).delete_before == canary.now) == deletes
    assert canary.jobs == []


@pytest.mark.parametrize(
    ("storage", "uri", "draft"),
    [
        (CLAIM, f"pvc://drafts/drafts/other/{TRAINED}", TRAINED),
        (CLAIM, "pvc://drafts/drafts/demo/abc", TRAINED),
        (CLAIM, f"pvc://drafts/drafts/demo/../demo/{TRAINED}", TRAINED),
        (CLAIM, "pvc://drafts/drafts/demo/..", ".."),
        (CLAIM, "pvc://drafts/drafts/demo/x/../../other", "x/../../other"),
        (CLAIM, f"file:///tmp/{TRAINED}", TRAINED),
        (CLAIM, f"pvc://drafts/drafts/demo/{OLD}", OLD),
        (S3, f"pvc://drafts/drafts/demo/{TRAINED}", TRAINED),
        (S3, f"s3://models/drafts/demo/{TRAINED}", TRAINED),
        (S3, f"s3://models/team/drafts/other/{TRAINED}", TRAINED),
        (S3, f"s3://others/team/drafts/demo/{TRAINED}", TRAINED),
        (S3, "s3://models/team/drafts/demo/other", TRAINED),
        (S3, f"s3://models/team/drafts/demo/../demo/{TRAINED}", TRAINED),
    ],
)
def test_a_draft_from_another_place_is_not_taken(storage: dict[str, Any], uri: str, draft: str) -> None:
    """Nor is the draft in use, at its own place."""
    canary = training(distillation={"storage": storage})
    canary.end_job(verdict(draft=Artifact(uri=uri, hash=draft)))
    assert (canary.phase, canary.record.candidate) == ("Cooldown", "")
    assert canary.record.last_run.outcome == "Failed"


def test_a_lost_job_is_created_again_after_a_pause_and_three_losses_fail_the_run() -> None:
    canary = training()
    for loss, pause in ((1, 60), (2, 120)):
        canary.jobs = []
        decision = canary.tick()
        assert canary.phase == "Distilling"
        assert f"loss {loss} of 3" in decision.changes[0].reason
        canary.tick(pause - 10)
        assert canary.jobs == [], "not yet"
        canary.tick(10)
        assert len(canary.jobs) == 1
        canary.tick()
    assert len(set(canary.created_jobs)) == 1, "the run's folder and name stay"
    canary.jobs = []
    canary.tick()
    assert canary.phase == "Cooldown"
    assert canary.record.run_outcomes == {"Failed": 1}


def test_a_job_that_was_never_seen_is_not_lost() -> None:
    canary = distilling()
    for _ in range(5):
        decision = canary.tick(push=False)
        assert decision.job is not None, "it may have been refused"
    assert canary.record.run.losses == 0


def test_a_job_that_is_being_deleted_counts_as_lost() -> None:
    canary = training()
    canary.jobs[0] = replace(canary.jobs[0], deleting=True)
    canary.tick(push=False)
    assert canary.record.run.losses == 1


def test_jobs_of_others_are_neither_followed_nor_deleted() -> None:
    canary = training()
    foreign = replace(canary.jobs[0], name="theirs", uid="x", owner_uid="u9", status=verdict())
    older = replace(foreign, name="older", uid="z", run="old")
    stray = replace(canary.jobs[0], name="stray", uid="y", run="old")
    canary.jobs = [foreign, older, stray, *canary.jobs]
    decision = canary.tick()
    assert [job.name for job in decision.ended_jobs] == ["stray"]
    assert canary.phase == "Distilling"


@pytest.mark.parametrize("phase", ["Collecting", "Distilling"])
def test_a_user_ends_a_run(phase: str) -> None:
    canary = training() if phase == "Distilling" else collecting()
    canary.carry_out("reject")
    assert canary.phase == "Cooldown"
    assert canary.record.last_run.outcome == "Rejected"
    assert canary.jobs == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CLAIM, {"uri": "pvc://new"}),
        (CLAIM, None),
        (S3, None),
        (S3, CLAIM),
        (S3, {**S3, "uri": "s3://others/team"}),
        (S3, {**S3, "uri": "s3://models/other"}),
        (S3, {**S3, "endpoint": "https://s3.example.com"}),
    ],
    ids=["claim", "no claim", "no bucket", "claim for a bucket", "bucket", "prefix", "endpoint"],
)
def test_another_storage_ends_the_run(before: dict[str, Any], after: dict[str, Any] | None) -> None:
    canary = training(distillation={"storage": before})
    canary.change(distillation={**DISTILLATION, "storage": after})
    canary.tick()
    assert (canary.phase, canary.record.run_outcomes) == ("Cooldown", {"Rejected": 1})
    assert canary.jobs == []


def test_another_key_of_the_bucket_does_not() -> None:
    canary = training(distillation={"storage": S3})
    canary.change(distillation={**DISTILLATION, "storage": {**S3, "secretRef": {"name": "rotated"}}})
    canary.tick()
    assert canary.phase == "Distilling"


def test_collecting_ends_when_capture_is_switched_off_and_after_max_age() -> None:
    off, slow = collecting(), collecting()
    off.change(distillation={**DISTILLATION, "capture": None})
    off.tick()
    assert (off.phase, off.record.run_outcomes) == ("Cooldown", {"Rejected": 1})
    slow.tick(336 * 3600 - 10)
    assert slow.phase == "Collecting"
    slow.tick(10)
    assert (slow.phase, slow.record.run_outcomes) == ("Cooldown", {"Expired": 1})
    assert "with 0 of 100 captured conversations" in slow.record.last_run.reason


def test_a_job_that_waits_for_ever_ends() -> None:
    canary = training()
    canary.job_ends(JobStatus(state=JobState.SUSPENDED, reason="the queue is full"))
    canary.tick(339 * 3600)
    assert canary.phase == "Distilling"
    canary.tick(3600)
    assert (canary.phase, canary.jobs) == ("Cooldown", [])


def test_another_draft_or_target_of_the_spec_ends_the_run_and_deletes_captures() -> None:
    for change in ({"speculation": {"draft": {"uri": "embedded://other"}}}, {"model": {"uri": "embedded://other"}}):
        canary = training()
        canary.change(distillation=DISTILLATION, **change)
        canary.tick()
        assert canary.phase == "Serving"
        assert canary.jobs == []
        assert rules(canary).delete_before == canary.now
        assert canary.record.run_outcomes == {"Superseded": 1}


def test_a_candidate_of_the_user_waits_for_the_run() -> None:
    canary = training()
    canary.offer()
    canary.ticks(2)
    assert canary.phase == "Distilling"
    canary.job_ends(verdict("worse"))
    canary.ticks(3)
    assert canary.phase == "Canary"
    assert canary.record.candidate == CANDIDATE["hash"]


@pytest.mark.parametrize(
    ("draft", "phase", "words"),
    [(CANDIDATE["hash"], "Canary", "the phase is Canary"), (OLD, "Collecting", "")],
    ids=["tried", "refused"],
)
def test_a_request_is_answered_also_if_an_offered_draft_is_taken_up_in_the_same_step(
    draft: str, phase: str, words: str
) -> None:
    canary = capturing()
    canary.offer({**CANDIDATE, "hash": draft})
    canary.carry_out("distill")
    assert canary.phase == phase
    assert canary.record.run_refusal.startswith(words)
    assert bool(canary.record.run_refusal) == bool(words)


def test_a_pause_keeps_the_job() -> None:
    canary = training()
    canary.deployment = with_pause(canary.deployment)
    canary.job_ends(verdict())
    decision = canary.tick(push=False)
    assert canary.phase == "Distilling"
    assert decision.ended_jobs == ()
    canary.deployment = with_pause(canary.deployment, False)
    canary.tick()
    assert canary.phase == "Canary"


def test_recovery_is_the_saved_share_of_the_lost_time() -> None:
    document = verdict(gain=0.25).verdict
    assert recovery_of(document, loss=0.4) == pytest.approx(0.5)
    assert recovery_of(document, loss=0.0) is None
    assert recovery_of(document, loss=0.1) == 1.0


def test_a_trained_draft_that_could_not_be_created_yet_was_not_deleted() -> None:
    canary = training()
    canary.job_ends(verdict())
    canary.tick(push=False)
    assert (canary.phase, canary.drafts) == ("Canary", [])
    writes = draft_writes(canary.deployment, canary.record, (), now=canary.now)
    observed = replace(canary.observed(), session=canary.session)
    later = canary.now + 5
    assert step_rollout(canary.deployment, observed, now=later).record.phase == "RollingBack", "as if it was deleted"
    unwritten = replace(observed, drafts=with_writes((), writes))
    assert step_rollout(canary.deployment, unwritten, now=later).record.phase == "Canary"


# --- drafts in a bucket ---------------------------------------------------------------------------------------------


def test_a_failed_run_leaves_nothing_to_delete_in_a_bucket_and_no_draft_is_deleted() -> None:
    canary = distilling(distillation={"storage": S3})
    command = canary.decision.job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert not any(word.startswith("--keep-drafts") for word in command)
    canary.ticks(2)
    canary.end_job(JobStatus(state=JobState.FAILED, reason="x"))
    canary.restart_operator()
    assert canary.record.last_run is not None
    assert canary.record.undeleted_run is None


# --- deletion of the folder of a run without a verdict, and the drafts that a Job keeps -------------------------------

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
    canary.carry_out("distill")
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


# --- capture in the plan: what the spec says, which values are refused, and what a change of it does ------------------


def capture(**fields: Any) -> dict[str, Any]:
    return {"distillation": {"capture": fields}}


def test_rules_are_those_of_the_spec_and_delete_what_the_record_says() -> None:
    fields = {"percent": 20, "percentByTask": {"code": 50}, "maxAge": "48h", "consent": "OptIn"}
    record = UNUSED.model_copy(update={"captures_deleted_before": 99.0})
    assert capture_rules(deployment_with(**capture(**fields, redact="mine:names")), record) == CaptureRules(
        share=0.2,
        task_shares={"code": 0.5},
        max_age_seconds=48 * 3600,
        redact="mine:names",
        consent="OptIn",
        delete_before=99.0,
    )
    assert capture_rules(deployment_with(), record) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"percentByTask": {"no task": 50}}, "capture.percentByTask: "),
        ({"maxAge": "0s"}, "capture.maxAge: "),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_its_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=f"distillation.{field}"):
        capture_rules(deployment_with(**capture(**fields)), UNUSED)


@pytest.mark.parametrize("fields", [{"percent": 0}, {"percent": 1}, {"percent": 100}], ids=str)
def test_limits_themselves_are_allowed(fields: dict[str, Any]) -> None:
    assert capture_rules(deployment_with(**capture(**fields)), UNUSED) is not None


def test_a_change_raises_the_version_and_is_pushed_without_rolling_pods() -> None:
    canary = Canary(deployment_with(replicas=2))
    before = canary.tick()
    canary.change(**capture())
    after = canary.tick(push=False)
    assert after.plan.capture == CaptureRules()
    assert after.plan.version == before.plan.version + 1
    assert set(after.pushes) == {"10.0.0.1", "10.0.0.2"}
    assert after.children[-1] == before.children[-1], "the workload is the same"
    assert canary.tick(push=False).plan == after.plan
    canary.change(distillation={})
    assert canary.tick().plan.capture is None
