"""Rollout and training of drafts as users see them: status, condition, Events, history, metrics and the plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdecode_operator import metrics
from specdecode_operator.api.v1alpha1 import Condition, DraftRunStatus, DraftStatus
from specdecode_operator.controller.deployment_loop import event_notices
from specdecode_operator.drafts.job_status import JobState, JobStatus
from specdecode_operator.plugin.drafts import change_for
from specdecode_operator.plugin.explain import past
from specdecode_operator.state.learned import UNUSED
from specdecode_operator.state.store import manifest_of
from support.operators.canary import (
    DISTILLATION,
    NEW,
    OLD,
    TRAINED,
    Canary,
    canary_with,
    capturing,
    collecting,
    distilling,
    listed,
    offer_another,
    refusal_of,
    shown,
    training,
    trying,
    verdict,
)
from support.operators.fleet import deployment_with
from support.operators.statuses import conditions, explained, resource_of, states


def rollout_of(canary: Canary) -> Condition | None:
    return conditions(shown(canary)).get("DraftRollout")


def samples(gauge: Any) -> dict[tuple[str, ...], float]:
    return gauge._values.get(("ns", "demo"), {})


def test_nothing_is_stored_assigned_or_shown_before_a_candidate_was_offered() -> None:
    canary = Canary(deployment_with(replicas=2))
    canary.ticks(3)
    assert canary.record == UNUSED
    assert canary.decision.plan.assignment is None
    assert shown(canary).draft == DraftStatus(hash=OLD, uri="embedded://d")
    assert rollout_of(canary) is None
    assert samples(metrics.DRAFT_PHASE) == {}


def test_a_trial_is_shown_with_its_gain() -> None:
    canary = trying()
    canary.finish_pairs(10, 0.04)
    draft = shown(canary).draft
    (tried,) = canary.drafts
    assert (draft.phase, tried.status.phase, tried.status.pairs) == ("Canary", "Canary", 10)
    assert tried.status.trial.pod == "pod-a"
    assert (tried.status.conditions[0].status, tried.status.conditions[0].reason) == ("False", "Canary")
    assert (draft.current.hash, draft.current.uri) == (OLD, "embedded://d")
    assert (draft.candidate.hash, draft.candidate.uri) == (NEW, "file:///new")
    assert tried.status.gain_percent == pytest.approx(4.0)
    condition = rollout_of(canary)
    assert (condition.status, condition.reason) == ("True", "Canary")
    assert "pod-a" in condition.message
    assert samples(metrics.DRAFT_PHASE) == {("Canary",): 1}
    assert samples(metrics.CANARY_PAIRS) == {(): 10}
    assert samples(metrics.CANDIDATE_GAIN)[("mean",)] == pytest.approx(0.04)


def test_a_promotion_is_an_event_and_history_with_its_gain() -> None:
    canary = trying()
    before = shown(canary)
    canary.finish_pairs(60, 0.10)
    notices = event_notices(before, shown(canary), canary.decision.changes)
    (message,) = [notice.message for notice in notices if notice.reason == "DraftRollout"]
    assert message.startswith(f"drafts: Canary {NEW} -> Promoting {NEW}: the candidate is faster: ")
    assert "gain +10.0 % (" in message
    text = "\n".join(past(resource_of(canary.deployment), canary.now))
    assert f"Promoting {NEW}" in text
    assert "+10 %" in text
    assert samples(metrics.CANARY_PAIRS) == {}
    assert samples(metrics.DRAFT_PHASE) == {("Promoting",): 1}
    canary.until("Cooldown")
    draft = shown(canary).draft
    assert (draft.current.hash, draft.previous.hash) == (NEW, OLD)
    (promoted,) = canary.drafts
    assert (promoted.status.outcome, promoted.status.gain_percent) == ("Promoted", pytest.approx(10.0))
    assert (promoted.status.conditions[0].status, promoted.status.conditions[0].reason) == ("True", "Serving")
    assert "the candidate is faster" in promoted.status.reason
    assert samples(metrics.CANDIDATES) == {("Promoted",): 1}
    metrics.forget("ns", "demo")
    assert samples(metrics.CANDIDATES) == {}


def test_a_refused_candidate_is_the_reason_to_look_at() -> None:
    canary = canary_with({"uri": "file:///copy", "hash": OLD})
    canary.tick()
    condition = rollout_of(canary)
    assert (condition.status, condition.reason) == ("False", "CandidateRefused")
    assert (canary.deployment.status.reason or "").startswith("CandidateRefused")


@pytest.mark.parametrize(("mode", "word"), [("Off", "mode is Off"), ("Auto", "no worker has reported")])
def test_a_candidate_that_waits_says_for_what(mode: str, word: str) -> None:
    canary = canary_with()
    canary.change(speculation={"mode": mode})
    if mode == "Auto":
        canary.pods = []
    canary.tick()
    condition = rollout_of(canary)
    assert condition.reason == "CandidateWaits"
    assert word in condition.message


def test_the_condition_says_which_draft_serves_in_place_of_that_of_the_spec() -> None:
    canary = trying()
    canary.finish_pairs(40, 0.3)
    canary.until("Cooldown")
    condition = rollout_of(canary)
    assert (condition.status, condition.reason) == ("False", "PromotedDraftServes")
    assert "run file:///new (new000new000)" in condition.message
    assert "whose SpecDecodeDraft has the role Serving" in condition.message
    canary.change(speculation={"draft": {"uri": "file:///new"}})
    canary.spec_draft = NEW
    canary.ticks(3)
    condition = rollout_of(canary)
    assert condition.reason == "NoRollout"
    assert [pod.draft for pod in canary.pods] == [NEW, NEW]


def test_the_plugin_shows_trial_and_lineage() -> None:
    canary = canary_with()
    shown(canary)
    assert listed(canary) == "no candidate was tried for demo yet; draft-0 (file:///new) waits"
    canary.ticks(2)
    canary.finish_pairs(10, 0.04)
    shown(canary)
    assert "Canary, mode Canary" in listed(canary)
    assert "Pod pod-a tries draft-0: 10 pairs, gain +4 %" in listed(canary)
    assert "Rollout of another draft: Canary." in explained(resource_of(canary.deployment), None, canary.now)
    canary.carry_out("reject")
    shown(canary)
    assert "Rejected" in listed(canary)


def test_commands_that_would_change_nothing_are_refused() -> None:
    canary = trying(mode="Manual")
    shown(canary)
    assert "no draft waits" in refusal_of("promote", canary)
    assert (refusal_of("reject", canary), refusal_of("rollback", canary)) == ("", "")
    canary.finish_pairs(60, 0.10)
    condition = rollout_of(canary)
    assert condition.reason == "WaitsForUser"
    assert refusal_of("promote", canary) == ""
    canary.command("promote")
    canary.until("Cooldown")
    shown(canary)
    assert "no draft is trained, tried" in refusal_of("reject", canary)
    assert refusal_of("rollback", canary) == ""
    offer_another(canary)
    known = list(map(manifest_of, canary.drafts))
    resource = resource_of(canary.deployment)
    named = {verb: change_for(verb, resource, known, "now").draft for verb in ("reject", "rollback")}
    assert named == {"rollback": "draft-0", "reject": "draft-1"}
    canary.command("rollback")
    canary.ticks(3)
    shown(canary)
    assert "no draft to return to" in refusal_of("rollback", canary)


# --- training runs ----------------------------------------------------------------------------------------------------

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
    assert samples(metrics.CAPTURED) == {(): 40}


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
    assert samples(metrics.DRAFT_RUNS) == {("NotBetter",): 1}
    assert samples(metrics.RUNS_NOT_BETTER) == {(): 1}
    metrics.forget("ns", "demo")
    assert metrics.DRAFT_RUNS._values == {}


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
    status = shown(canary)
    assert words in canary.record.run_refusal
    assert states(status)["DraftRollout"] == ("False", "RunRefused")
    assert words in conditions(status)["DraftRollout"].message
    assert words in listed(canary)
    assert refusal_of("distill", canary) == canary.record.run_refusal


@pytest.mark.parametrize("begun", [partly_collected, training], ids=["collecting", "distilling"])
def test_operator_and_plugin_refuse_a_second_run_in_the_same_words(begun: Callable[[], Canary]) -> None:
    canary = begun()
    run = canary.record.run
    canary.carry_out("distill")
    shown(canary)
    assert refusal_of("distill", canary) == canary.record.run_refusal
    assert f"phase is {canary.phase}" in canary.record.run_refusal
    assert refusal_of("reject", canary) == ""
    assert canary.record.run == run


def test_without_a_run_one_may_begin_and_none_is_rejected() -> None:
    canary = capturing()
    shown(canary)
    assert refusal_of("distill", canary) == ""
    assert "no draft is trained" in refusal_of("reject", canary)
