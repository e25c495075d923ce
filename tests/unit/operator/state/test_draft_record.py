"""Stored rollout of drafts: the round trip, and what an unreadable entry costs."""

from __future__ import annotations

import json

import pytest

from specdecode_operator.state.draft_record import (
    DRAFTS_KEY,
    UNUSED,
    CountedPair,
    DraftRecord,
    TrialRecord,
    parse_drafts,
    render_drafts,
)
from specdecode_operator.state.session import Session
from support.operators.canary import CANDIDATE, NEW, OLD, trying


def full() -> DraftRecord:
    """Return the record of a deployment with a lineage and a second trial."""
    canary = trying()
    canary.finish_pairs(3, 0.1)
    canary.command("reject")
    canary.until("Cooldown")
    canary.change(draft_rollout={"candidate": {**CANDIDATE, "hash": "third0third0"}})
    canary.ticks(2)
    canary.finish_pairs(5, 0.05)
    return canary.record


def test_a_record_is_read_as_it_was_written() -> None:
    record = full()
    assert record.trial is not None
    assert record.lineage
    assert parse_drafts(render_drafts(record)) == record


def test_fields_of_a_newer_operator_are_ignored() -> None:
    record = full()
    document = json.loads(render_drafts(record)[DRAFTS_KEY])
    document["lineage"][0]["novelty"] = {"isDefaulted": True}
    assert parse_drafts({DRAFTS_KEY: json.dumps({**document, "mood": "good"})}) == record


@pytest.mark.parametrize("text", ["", "{", "[]", '{"phase": "Dancing"}', '{"trial": {"id": 3}}', "null"])
def test_an_unreadable_record_serves_the_draft_of_the_spec(text: str) -> None:
    record = parse_drafts({DRAFTS_KEY: text})
    assert record.problem
    assert (record.phase, record.current, record.trial) == ("Serving", "", None)
    assert parse_drafts(render_drafts(record)) == record, "the problem is shown after a restart too"


def test_the_problem_of_an_unreadable_record_ends_with_the_next_candidate() -> None:
    canary = trying()
    canary.session = Session(learned=canary.session.learned, drafts=parse_drafts({DRAFTS_KEY: "{"}))
    canary.ticks(3)
    assert (canary.phase, canary.record.is_used) == ("Serving", False)
    assert canary.record.problem
    canary.change(draft_rollout={"candidate": {**CANDIDATE, "hash": "third0third0"}})
    canary.tick()
    assert (canary.phase, canary.record.problem) == ("Canary", "")


def test_a_long_trial_is_stored_exactly() -> None:
    pairs = tuple(
        CountedPair(total=(index - 200) / 7000, tasks={"other": index / 3, "code": 0.0}) for index in range(500)
    )
    trial = TrialRecord(id="t", started_at=1.5, block_requests=32, max_pairs=500, min_gain=0.02, pairs=pairs)
    record = UNUSED.model_copy(update={"spec_draft": "file:///d", "trial": trial})
    data = render_drafts(record)
    assert parse_drafts(data) == record
    assert len(data[DRAFTS_KEY]) < 64 * 1024


def test_a_short_record_can_be_read_by_a_person() -> None:
    document = json.loads(render_drafts(trying().record)[DRAFTS_KEY])
    assert (document["phase"], document["candidate"], document["spec_hash"]) == ("Canary", NEW, OLD)


def test_nothing_is_stored_of_a_deployment_without_a_candidate() -> None:
    assert render_drafts(UNUSED) == {}
    assert parse_drafts({}) == UNUSED
