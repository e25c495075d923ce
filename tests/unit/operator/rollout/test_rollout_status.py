"""Rollout of drafts as users see it: status, condition, Events, history, metrics and the plugin."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator import metrics
from specdecode_operator.api.v1alpha1 import Condition, DraftStatus
from specdecode_operator.controller.deployment_loop import event_notices
from specdecode_operator.plugin.drafts import change_for
from specdecode_operator.plugin.explain import past
from specdecode_operator.state.learned import UNUSED
from specdecode_operator.state.store import manifest_of
from support.operators.canary import NEW, OLD, Canary, canary_with, listed, offer_another, refusal_of, shown, trying
from support.operators.fleet import deployment_with
from support.operators.statuses import conditions, explained, resource_of


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
