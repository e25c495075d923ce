"""Training runs as users see them: status, condition, metrics and the plugin."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator import metrics
from specdecode_operator.api.v1alpha1 import DraftRunStatus
from specdecode_operator.drafts.job_status import JobState, JobStatus
from support.operators.canary import (
    DISTILLATION,
    TRAINED,
    Canary,
    capturing,
    collecting,
    distilling,
    listed,
    refusal_of,
    shown,
    training,
    verdict,
)
from support.operators.statuses import conditions, explained, resource_of, states

QUOTA = "jobs.batch is forbidden: exceeded quota"
UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def partly_collected() -> Canary:
    """Return a deployment whose run has 40 of the 100 conversations that it needs."""
    canary = collecting()
    canary.pods[0].captured = 40
    return canary


def test_collecting_shows_how_many_conversations_there_are() -> None:
    canary = partly_collected()
    status = shown(canary)
    run = status.draft.run
    assert (status.draft.phase, run.conversations, run.needed, run.job) == ("Collecting", 40, 100, None)
    assert states(status)["DraftRollout"] == ("True", "Collecting")
    assert "until the workers hold 100 conversations" in conditions(status)["DraftRollout"].message
    assert "40 of 100 conversations" in listed(canary)
    assert "Collecting" in explained(resource_of(canary.deployment), None, canary.now)
    assert metrics.CAPTURED._values["ns", "demo"] == {(): 40}


def test_a_worker_that_cannot_capture_is_named() -> None:
    canary = partly_collected()
    canary.pods[1].captured = None
    status = shown(canary)
    assert "worker pod-b has no folder" in str(status.draft.run.capture_problem)
    assert "worker pod-b has no folder" in conditions(status)["DraftRollout"].message
    assert "worker pod-b has no folder" in listed(canary)


def test_the_count_changes_status_at_most_a_hundred_times() -> None:
    canary = partly_collected()
    trigger = {"minConversations": 1000}
    canary.change(distillation={"capture": {}, "storage": {"uri": "pvc://drafts"}, "trigger": trigger})
    counts = set()
    for count in range(0, 1200, 7):
        canary.pods[0].captured = count
        counts.add(shown(canary).draft.run.conversations)
    assert len(counts) <= 101
    assert max(count for count in counts if count is not None) == 1000


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        (JobStatus(state=JobState.UNSCHEDULABLE, reason=UNSCHEDULABLE), "Unschedulable", UNSCHEDULABLE),
        (JobStatus(state=JobState.SUSPENDED, reason="Job suspended"), "Suspended", "Job suspended"),
        (JobStatus(state=JobState.RUNNING), "Running", None),
    ],
    ids=["unschedulable", "suspended", "running"],
)
def test_distilling_shows_the_job_in_the_words_of_the_cluster(
    status: JobStatus, state: str, reason: str | None
) -> None:
    canary = training()
    canary.end_job(status)
    seen = shown(canary)
    run = seen.draft.run
    assert (run.job, run.job_state, run.job_reason) == (canary.created_jobs[0], state, reason)
    assert states(seen)["DraftRollout"] == ("True", "Distilling")
    assert state in conditions(seen)["DraftRollout"].message
    assert state in listed(canary)


def test_a_refused_and_a_lost_job_are_named() -> None:
    canary = distilling()
    run = shown(canary, QUOTA).draft.run
    assert (run.job_state, run.job_reason) == ("Refused", QUOTA)
    canary.ticks(2)
    canary.jobs = []
    canary.tick()
    run = shown(canary).draft.run
    assert (run.job_state, run.losses) == ("Absent", 1)
    assert "created again" in str(run.job_reason)


def test_a_refusal_of_any_length_fits_the_status() -> None:
    """The API server refuses the whole status for one text that is too long."""
    run = shown(distilling(), f"{QUOTA}{' and more' * 1000}").draft.run
    assert run.job_reason.startswith(QUOTA)
    assert DraftRunStatus.model_validate(run.model_dump()) == run


def test_the_latest_run_is_shown_with_its_gain_and_counted() -> None:
    canary = training()
    canary.end_job(verdict("inconclusive", gain=0.01))
    draft = shown(canary).draft
    last = draft.last_run
    assert draft.run is None
    assert (last.outcome, last.gain_percent) == ("NotBetter", 1.0)
    assert (last.least_gain_percent, last.most_gain_percent) == (-4.0, 6.0)
    assert (last.hash, last.conversations, last.device_seconds) == (TRAINED, 90, 600)
    assert "NotBetter, 0.17 device hours: inconclusive: gain +1.0 % (-4.0 to +6.0 %)" in listed(canary)
    assert metrics.DRAFT_RUNS._values["ns", "demo"] == {("NotBetter",): 1}
    assert metrics.RUNS_NOT_BETTER._values["ns", "demo"] == {(): 1}
    metrics.forget("ns", "demo")
    assert metrics.DRAFT_RUNS._values == {}


def test_a_refused_command_is_shown() -> None:
    canary = capturing(distillation={"storage": None})
    canary.carry_out("distill")
    status = shown(canary)
    assert states(status)["DraftRollout"] == ("False", "RunRefused")
    assert "distillation.storage is absent" in conditions(status)["DraftRollout"].message
    assert "distillation.storage is absent" in listed(canary)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"speculation": {"method": "medusa"}, "distillation": {}}, "only eagle3 drafts"),
        ({"speculation": {"mode": "Off"}}, "mode is Off"),
        ({"distillation": {**DISTILLATION, "storage": None}}, "distillation.storage is absent"),
        ({"distillation": {}}, "distillation.capture is absent"),
    ],
    ids=["method", "mode", "claim", "capture"],
)
def test_operator_and_plugin_refuse_a_run_in_the_same_words(spec: dict[str, Any], words: str) -> None:
    canary = capturing()
    canary.change(**{"distillation": DISTILLATION, **spec})
    canary.carry_out("distill")
    shown(canary)
    assert words in canary.record.run_refusal
    assert refusal_of("distill", canary) == canary.record.run_refusal


def test_operator_and_plugin_refuse_a_second_run_in_the_same_words() -> None:
    canary = partly_collected()
    canary.carry_out("distill")
    shown(canary)
    assert refusal_of("distill", canary) == canary.record.run_refusal
    assert "phase is Collecting" in canary.record.run_refusal
    assert refusal_of("reject", canary) == ""


def test_the_plugin_says_which_commands_a_run_takes() -> None:
    canary = capturing()
    shown(canary)
    assert refusal_of("distill", canary) == ""
    assert "no draft is trained" in refusal_of("reject", canary)
    canary = partly_collected()
    shown(canary)
    assert refusal_of("reject", canary) == ""
    assert "phase is Collecting" in refusal_of("distill", canary)
