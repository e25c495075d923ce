"""Stored training runs and drafts: the round trip, and what an unreadable entry costs."""

from __future__ import annotations

import json

import pytest

from specdecode_operator.api.draft import CountedPair, SpecDecodeDraft, TrialRecord
from specdecode_operator.state.learned import (
    LINEAGE,
    TRAINING_KEY,
    UNUSED,
    DraftRecord,
    RunRecord,
    parse_training,
    render_training,
)
from specdecode_operator.state.store import draft_writes, manifest_of, record_of, surplus
from support.operators.canary import NEW, TRAINED, Canary, distilling, offer_another, promoted, trying, verdict


def full() -> Canary:
    """Return a deployment with a lineage and a second trial."""
    canary = trying()
    canary.finish_pairs(3, 0.1)
    canary.command("reject")
    canary.until("Cooldown")
    offer_another(canary)
    canary.finish_pairs(5, 0.05)
    return canary


def test_nothing_is_written_of_drafts_at_rest() -> None:
    canary = full()
    assert draft_writes(canary.deployment, canary.record, canary.observed().drafts, now=canary.now + 99) == []


def test_fields_of_a_newer_operator_are_ignored() -> None:
    canary = full()
    document = json.loads(render_training(canary.record)[TRAINING_KEY])
    assert parse_training({TRAINING_KEY: json.dumps({**document, "mood": "good"})}).phase == "Canary"
    manifest = manifest_of(canary.drafts[0])
    newer = {**manifest, "status": {**manifest["status"], "novelty": {"isDefaulted": True}}}
    assert SpecDecodeDraft.model_validate(newer) == canary.drafts[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"phase": "Dancing"}', '{"run": {"id": 3}}', "null"])
def test_unreadable_training_runs_are_an_error_and_lose_no_draft(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_training({TRAINING_KEY: text})
    canary = promoted()
    assert record_of(canary.drafts, UNUSED).current == NEW


def test_a_long_trial_is_stored_exactly() -> None:
    pairs = tuple(
        CountedPair(total=(index - 200) / 7000, tasks={"other": index / 3, "code": 0.0}) for index in range(500)
    )
    trial = TrialRecord(id="t", block_requests=32, min_gain=0.02, pairs=pairs)
    canary = trying()
    status = canary.drafts[0].status.model_copy(update={"trial": trial})
    text = json.dumps(manifest_of(canary.drafts[0].model_copy(update={"status": status})))
    assert SpecDecodeDraft.model_validate_json(text).status.trial == trial
    assert len(text) < 64 * 1024


def test_the_draft_of_a_run_has_its_evaluation_and_is_deleted_when_it_is_old() -> None:
    canary = distilling()
    canary.push()
    canary.job_ends(verdict())
    canary.ticks(2)
    (draft,) = canary.drafts
    assert (draft.name, draft.spec.uri) == (f"demo-{TRAINED}", f"pvc://drafts/drafts/demo/{TRAINED}")
    assert (draft.status.evaluation.outcome, draft.status.evaluation.gain_percent) == ("Better", 20.0)
    assert "ownerReferences" not in draft.metadata, "it outlives its deployment"
    canary.command("reject")
    canary.ticks(3)
    (ended,) = canary.drafts
    later = [
        ended.model_copy(update={"status": ended.status.model_copy(update={"outcome_time": f"2030-01-0{day}"})})
        for day in range(LINEAGE)
    ]
    assert surplus([ended, *later]) == [ended]
    own = ended.model_copy(update={"metadata": {"name": "mine"}})
    assert surplus([own, *later]) == [], "a draft that a user offered is not deleted"
    serving = ended.spec.model_copy(update={"role": "Serving", "hash": NEW, "replaces": ended.id})
    others = [
        one.model_copy(update={"spec": ended.spec.model_copy(update={"hash": f"h{day}"})})
        for day, one in enumerate(later)
    ]
    assert surplus([ended, ended.model_copy(update={"spec": serving}), *others]) == [], "a rollback would restore it"


def test_a_run_whose_folder_is_not_deleted_yet_is_stored_though_nothing_is_trained_any_more() -> None:
    run = RunRecord(id="6740f2a1", started=1.0)
    assert parse_training(render_training(DraftRecord(undeleted_run=run))).undeleted_run == run
    assert render_training(UNUSED) == {}


def test_the_draft_before_is_an_offer_again_if_a_user_says_so() -> None:
    """While another run is under way it waits, as any other offer."""
    canary = promoted()
    offer_another(canary)
    canary.finish_pairs(60, 0.10)
    canary.until("Cooldown")
    assert canary.record.previous == NEW
    canary.offer({"uri": "file:///fourth", "hash": "fourth0fourth"})
    canary.until("Canary")
    canary.set_role(NEW, "Serving")
    canary.tick()
    (draft,) = [one for one in canary.drafts if one.id == NEW]
    assert draft.spec.role == "Serving"
