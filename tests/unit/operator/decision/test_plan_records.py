"""Records of the changes of a plan: the loads and reasons that users read."""

from __future__ import annotations

from specdecode_operator.decision.plan import records
from specdecode_operator.planning.estimates import buckets_for
from specdecode_operator.planning.search import Change
from specdecode_operator.state.learned import LearnedState, LoadState, RowState
from specdecode_worker.contract import TreeShape

PRESENT = LearnedState(load=LoadState(sequences=1.9, context_bucket=0, task="other", at=1))
BUCKETS = buckets_for(8)


def moved(concurrency: int, depth: int, reason: str, *, follows: bool = False) -> Change:
    row = RowState(concurrency=concurrency, context=0, task="other", depth=depth, since=1)
    before = TreeShape.chain(3)
    return Change(row=row, before=before, gain=0.1, cause="gain", reason=reason, follows=follows)


def test_a_load_that_was_decided_leads_those_that_follow_it() -> None:
    changes = [moved(0, 2, "at one"), moved(1, 2, "at one", follows=True), moved(2, 2, "at one", follows=True)]
    (record,) = records(changes, PRESENT, BUCKETS, 5.0)
    assert record.load == "concurrency 1 or 2 or 3-4, context <=1024, task other"
    assert record.reason == "at one; concurrency 2 or 3-4, context <=1024 follows"


def test_the_present_load_leads_those_that_were_decided_like_it() -> None:
    (record,) = records([moved(0, 2, "at one"), moved(1, 2, "at two")], PRESENT, BUCKETS, 5.0)
    assert record.load == "concurrency 2 or 1, context <=1024, task other"
    assert record.reason == "at two"


def test_the_record_of_the_present_load_is_the_latest() -> None:
    made = records([moved(1, 2, "at two"), moved(0, 1, "at one"), moved(3, 0, "above")], PRESENT, BUCKETS, 5.0)
    assert [record.reason for record in made] == ["at one", "above", "at two"]
