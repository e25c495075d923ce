"""Training runs whose drafts go to a bucket: what is stored, accepted, and deleted."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_worker.contract import Artifact
from support.operators.canary import DISTILLATION, TRAINED, distilling, training, verdict

S3 = {"uri": "s3://models/team", "secretRef": {"name": "key"}}
BUCKET = {**DISTILLATION, "storage": S3}
PLACE = f"s3://models/team/drafts/demo/{TRAINED}"


def test_a_better_draft_in_the_bucket_is_tried_and_assigned_by_its_place() -> None:
    canary = training(distillation={"storage": S3})
    canary.job_ends(verdict(draft=Artifact(uri=PLACE, hash=TRAINED)))
    canary.tick()
    assert (canary.phase, canary.record.uris[TRAINED]) == ("Canary", PLACE)
    canary.tick()
    canary.finish_pairs(40, 0.3)
    canary.until("Cooldown")
    assignment = canary.decision.plan.assignment
    assert assignment.stable == Artifact(uri=PLACE, hash=TRAINED)


@pytest.mark.parametrize(
    "uri",
    [
        f"pvc://drafts/drafts/demo/{TRAINED}",
        f"s3://models/drafts/demo/{TRAINED}",
        f"s3://models/team/drafts/other/{TRAINED}",
        f"s3://others/team/drafts/demo/{TRAINED}",
        "s3://models/team/drafts/demo/other",
        f"s3://models/team/drafts/demo/../demo/{TRAINED}",
    ],
)
def test_a_draft_at_another_place_is_not_taken(uri: str) -> None:
    canary = training(distillation={"storage": S3})
    canary.job_ends(verdict(draft=Artifact(uri=uri, hash=TRAINED)))
    canary.tick()
    assert (canary.phase, canary.record.candidate) == ("Cooldown", "")


@pytest.mark.parametrize(
    "storage",
    [
        {"uri": "pvc://drafts"},
        {**S3, "uri": "s3://others/team"},
        {**S3, "uri": "s3://models/other"},
        {**S3, "endpoint": "https://s3.example.com"},
        None,
    ],
    ids=["claim", "bucket", "prefix", "endpoint", "none"],
)
def test_another_storage_ends_the_run(storage: dict[str, Any] | None) -> None:
    canary = training(distillation={"storage": S3})
    canary.change(distillation={**DISTILLATION, "storage": storage})
    canary.tick()
    assert (canary.phase, canary.record.run_outcomes) == ("Cooldown", {"Rejected": 1})


def test_another_key_does_not() -> None:
    canary = training(distillation={"storage": S3})
    canary.change(distillation={**BUCKET, "storage": {**S3, "secretRef": {"name": "rotated"}}})
    canary.tick()
    assert canary.phase == "Distilling"


def test_a_failed_run_leaves_nothing_to_delete_and_no_draft_is_deleted() -> None:
    canary = distilling(distillation={"storage": S3})
    command = canary.decision.job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert not any(word.startswith("--keep-drafts") for word in command)
    canary.ticks(2)
    canary.job_ends(JobStatus(state=JobState.FAILED, reason="x"))
    canary.tick()
    canary.restart_operator()
    assert canary.record.last_run is not None
    assert canary.record.undeleted_run is None


def test_another_operator_goes_on_with_the_run() -> None:
    canary = training(distillation={"storage": S3})
    before = canary.record.run
    canary.restart_operator()
    canary.tick()
    assert canary.record.run == before
    assert before.place == "s3://models/team"
