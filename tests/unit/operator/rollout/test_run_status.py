"""Training runs as users see them: status, condition, metrics and the plugin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import metrics
from specdecode_operator import metrics as run_metrics
from specdecode_operator.api.v1alpha1 import Condition, DraftStatus, Status
from specdecode_operator.controller.status import status_of
from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.plugin.drafts import drafts
from specdecode_operator.plugin.explain import explain
from specdecode_operator.state.store import manifest_of
from specdecode_operator.types import Outcome
from support.operators.canary import (
    DISTILLATION,
    TRAINED,
    Canary,
    capturing,
    distilling,
    refusal_of,
    resource_of,
    training,
    verdict,
)

QUOTA = "jobs.batch is forbidden: exceeded quota"
UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def shown(canary: Canary, job_problem: str = "") -> Status:
    """Return the status after the last decision, and keep it in the deployment."""
    assert canary.decision is not None
    observed = replace(canary.observed(), session=canary.session)
    outcome = Outcome(job_problem=job_problem)
    status = status_of(canary.deployment, observed, canary.decision, outcome, now=canary.now)
    metrics.record(canary.deployment, observed, canary.decision, status)
    canary.deployment = replace(canary.deployment, status=status)
    return status


def draft_of(status: Status) -> DraftStatus:
    assert status.draft is not None
    return status.draft


def condition_of(status: Status) -> Condition:
    return {condition.type: condition for condition in status.conditions}["DraftRollout"]


def text_of(canary: Canary) -> str:
    return " ".join(" ".join(drafts(resource_of(canary), map(manifest_of, canary.drafts), canary.now)).split())


def collecting(captured: int = 40) -> Canary:
    canary = capturing()
    canary.command("distill")
    canary.tick()
    canary.pods[0].captured = captured
    return canary


def test_collecting_shows_how_many_conversations_there_are() -> None:
    canary = collecting()
    status = shown(canary)
    run = draft_of(status).run
    assert (draft_of(status).phase, run.conversations, run.needed, run.job) == ("Collecting", 40, 100, None)
    condition = condition_of(status)
    assert (condition.status, condition.reason) == ("True", "Collecting")
    assert "until the workers hold 100 conversations" in condition.message
    assert "40 of 100 conversations" in text_of(canary)
    assert "Collecting" in "\n".join(explain(resource_of(canary), None, canary.now, ""))
    assert run_metrics.CAPTURED._values["ns", "demo"] == {(): 40}


def test_a_worker_that_cannot_capture_is_named() -> None:
    canary = collecting()
    canary.pods[1].captured = None
    status = shown(canary)
    run = draft_of(status).run
    assert "worker pod-b has no folder" in str(run.capture_problem)
    assert "worker pod-b has no folder" in condition_of(status).message
    assert "worker pod-b has no folder" in text_of(canary)


def test_the_count_changes_status_at_most_a_hundred_times() -> None:
    canary = collecting()
    trigger = {"minConversations": 1000}
    canary.change(distillation={"capture": {}, "storage": {"uri": "pvc://drafts"}, "trigger": trigger})
    counts = set()
    for count in range(0, 1200, 7):
        canary.pods[0].captured = count
        run = draft_of(shown(canary)).run
        counts.add(run.conversations)
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
    canary.job_ends(status)
    canary.tick()
    seen = shown(canary)
    run = draft_of(seen).run
    assert (run.job, run.job_state, run.job_reason) == (canary.created_jobs[0], state, reason)
    assert (condition_of(seen).status, condition_of(seen).reason) == ("True", "Distilling")
    assert state in condition_of(seen).message
    assert state in text_of(canary)


def test_a_refused_and_a_lost_job_are_named() -> None:
    canary = distilling()
    run = draft_of(shown(canary, QUOTA)).run
    assert (run.job_state, run.job_reason) == ("Refused", QUOTA)
    canary.ticks(2)
    canary.jobs = []
    canary.tick()
    run = draft_of(shown(canary)).run
    assert (run.job_state, run.losses) == ("Absent", 1)
    assert "created again" in str(run.job_reason)


def test_the_latest_run_is_shown_with_its_gain_and_counted() -> None:
    canary = training()
    canary.job_ends(verdict("inconclusive", gain=0.01))
    canary.tick()
    status = shown(canary)
    last = draft_of(status).last_run
    assert draft_of(status).run is None
    assert (last.outcome, last.gain_percent, last.least_gain_percent, last.most_gain_percent) == (
        "NotBetter",
        1.0,
        -4.0,
        6.0,
    )
    assert (last.hash, last.conversations, last.device_seconds) == (TRAINED, 90, 600)
    assert "NotBetter, 0.17 device hours: inconclusive: gain +1.0 % (-4.0 to +6.0 %)" in text_of(canary)
    assert run_metrics.DRAFT_RUNS._values["ns", "demo"] == {("NotBetter",): 1}
    assert run_metrics.RUNS_NOT_BETTER._values["ns", "demo"] == {(): 1}
    metrics.forget("ns", "demo")
    assert run_metrics.DRAFT_RUNS._values == {}


def test_a_refused_command_is_shown_and_the_plugin_refuses_it_first() -> None:
    canary = capturing(distillation={"storage": None})
    canary.command("distill")
    canary.tick()
    condition = condition_of(shown(canary))
    assert (condition.status, condition.reason) == ("False", "RunRefused")
    assert "distillation.storage is absent" in condition.message
    assert "distillation.storage is absent" in text_of(canary)
    assert "distillation.storage is absent" in refusal_of("distill", canary)


@pytest.mark.parametrize(
    "spec",
    [
        {"speculation": {"method": "medusa"}, "distillation": {}},
        {"speculation": {"mode": "Off"}},
        {"distillation": {**DISTILLATION, "storage": None}},
        {"distillation": {}},
    ],
    ids=["method", "mode", "claim", "capture"],
)
def test_operator_and_plugin_refuse_a_run_in_the_same_words(spec: dict[str, Any]) -> None:
    canary = capturing()
    canary.change(**{"distillation": DISTILLATION, **spec})
    canary.command("distill")
    canary.tick()
    shown(canary)
    assert canary.record.run_refusal
    assert refusal_of("distill", canary) == canary.record.run_refusal


def test_operator_and_plugin_refuse_a_second_run_in_the_same_words() -> None:
    canary = collecting()
    canary.command("distill")
    canary.tick()
    shown(canary)
    assert refusal_of("distill", canary) == canary.record.run_refusal != ""


def test_the_plugin_says_which_commands_a_run_takes() -> None:
    canary = capturing()
    shown(canary)
    assert refusal_of("distill", canary) == ""
    assert "no draft is trained" in refusal_of("reject", canary)
    canary = collecting()
    shown(canary)
    assert refusal_of("reject", canary) == ""
    assert "phase is Collecting" in refusal_of("distill", canary)
