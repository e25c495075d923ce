"""Credit of merged drafts: read from reports, learnt like acceptance, stored, and bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.decision.merging import (
    COMMON,
    TUNING,
    Credit,
    TaskDrafts,
    carried,
    choose_merges,
    counts_of,
    learn_credit,
    own_acceptance,
    subsets_of,
)
from specdecode_operator.planning.estimates import buckets_for
from specdecode_operator.state.learned import (
    STATE_KEY,
    AcceptanceCell,
    CreditCell,
    LearnedState,
    MergeChoice,
    parse_state,
    render_state,
)
from specdecode_operator.telemetry.counters import Delta, Hits, difference, fleet
from specdecode_operator.types import Observation
from support.operators.fleet import deployment_with, loop_over
from support.operators.merging import OWN, TASK, MergedTruth, any_credit, merging_loop

HEAD = "hash-head"


def polled(**counts: float) -> Delta:
    """Return a poll of 100 drafts of one task, whose head is merged."""
    own, head, common = (counts.get(name, 50.0) for name in ("own", "head", "common"))
    return Delta(
        draft=OWN,
        seconds=5,
        acceptance={(TASK, 1): Hits(common, 100)},
        credit={(TASK, OWN, 1, "main"): Hits(own, 100), (TASK, HEAD, 1, "main"): Hits(head, 100)},
    )


def learnt(*deltas: Delta) -> LearnedState:
    learned = LearnedState(draft=OWN)
    for index, delta in enumerate(deltas):
        learned = learn_credit(learned, delta, [TASK], 1000 + 5 * index)
    return learned


def test_credit_is_the_difference_of_reports_by_draft() -> None:
    loop = merging_loop({"head": MergedTruth(0.5)})
    loop.poll()
    reports = []
    for _ in range(2):
        loop.worker.run(3)
        reports.append(loop.worker.report())
    delta = difference(*reports, at=1, buckets=buckets_for(16))
    assert {key[:2] for key in delta.credit} == {(TASK, OWN), (TASK, HEAD)}
    before, after = ({(c.draft, c.depth): c for c in report.credit} for report in reports)
    for key, hits in delta.credit.items():
        cells = [cells.get((key[1], key[2])) for cells in (before, after)]
        counts = [(cell.ranks[0], cell.total) if cell else (0, 0) for cell in cells]
        assert (hits.hits, hits.total) == tuple(b - a for a, b in zip(*counts, strict=True))
    twice = fleet([delta, delta], at=2, draft=OWN)
    assert twice.credit[TASK, HEAD, 1, "main"].total == 2 * delta.credit[TASK, HEAD, 1, "main"].total
    assert delta.without_acceptance().credit == {}


def test_credit_and_the_common_order_are_learnt_together() -> None:
    learned = learnt(polled(own=40, head=20, common=55), polled(own=40, head=20, common=55))
    rates = {d: counts_of(learned, TASK, d)[1, "main"] for d in (COMMON, OWN, HEAD)}
    assert [round(hits.hits / hits.total, 2) for hits in rates.values()] == [0.55, 0.4, 0.2]
    assert all(hits.total > 100 for hits in rates.values())
    assert learn_credit(learned, None, [TASK], 2000) is learned
    assert learn_credit(learned, None, [], 2000).credit == ()


def test_a_change_point_outdates_credit() -> None:
    learned = learnt(*[polled(head=5)] * 6, polled(head=60), polled(head=60))
    hits = counts_of(learned, TASK, HEAD)[1, "main"]
    assert hits.hits / hits.total > 0.4


def test_the_stored_cells_are_bounded_and_the_latest_stay() -> None:
    learned = LearnedState(draft=OWN)
    for index in range(40):
        credit: Any = {(TASK, f"draft-{index}", depth, "main"): Hits(1, 2) for depth in range(1, 17)}
        learned = learn_credit(learned, Delta(seconds=5, credit=credit), [TASK], 1000.0 + index)
    assert len(learned.credit) == TUNING.max_cells
    assert {cell.draft for cell in learned.credit} >= {"draft-39", "draft-20"}
    assert len(render_state(learned)[STATE_KEY]) < 24 * 1024


def test_credit_and_choices_survive_a_restart_of_the_operator() -> None:
    choice = MergeChoice(task=TASK, drafts=(), declared=("head",), hashes=(OWN, HEAD), since=5, before=("head",))
    learned = learnt(polled()).model_copy(update={"uid": "u", "merges": (choice,)})
    again = parse_state(render_state(learned), "u", learned.plan)
    assert (again.credit, again.merges) == (learned.credit, learned.merges)


def test_credit_survives_a_swap_of_the_own_draft_under_its_hash() -> None:
    swapped = learnt(polled(head=20), replace(polled(), credit={(TASK, "d2", 1, "main"): Hits(9, 10)}))
    assert counts_of(swapped, TASK, OWN)[1, "main"].total == 100
    assert counts_of(swapped, TASK, "d2")[1, "main"] == Hits(9, 10)


def test_drift_is_measured_by_the_draft_on_its_own() -> None:
    delta = own_acceptance(polled(own=40, common=55), OWN)
    assert delta.acceptance == {(TASK, 1): Hits(40, 100)}
    plain = Delta(acceptance={(TASK, 1): Hits(40, 100)})
    assert own_acceptance(plain, OWN) is plain


def test_after_a_change_the_acceptance_counts_for_few_drafts_and_the_credit_for_none() -> None:
    cells = (AcceptanceCell(task=TASK, depth=1, hits=300, total=600, at=1, ranks=(60.0,)),)
    others = (AcceptanceCell(task="other", depth=1, hits=300, total=600, at=1),)
    credit = (CreditCell(task=TASK, depth=1, hits=1, total=2, at=1, draft=OWN),)
    after = carried(LearnedState(acceptance=(*cells, *others), credit=credit), TASK, 50)
    assert (after.acceptance[0].hits, after.acceptance[0].total, after.acceptance[0].ranks) == (30, 60, (6,))
    assert after.acceptance[0].changed_at == 50
    assert (after.acceptance[1:], after.credit) == (others, ())


# --- fewer drafts -------------------------------------------------------------------------------------------------


def cell(draft: str, depth: int, hits: float, total: float) -> CreditCell:
    return CreditCell(task=TASK, draft=draft, depth=depth, hits=hits, total=total, at=1)


DRAFTS = TaskDrafts(TASK, OWN, {"lookup": "l", "head": HEAD}, {"lookup": 4})
STATE = LearnedState(
    credit=(
        *(cell(COMMON, 1, 700, 1000), cell(COMMON, 2, 490, 700), cell(COMMON, 3, 90, 100)),
        *(cell(OWN, 1, 500, 1000), cell(OWN, 2, 350, 700)),
        *(cell(HEAD, 1, 0, 1000), cell(HEAD, 2, 0, 700)),
        *(cell("l", 1, 300, 400), cell("l", 2, 150, 250), cell("l", 3, 90, 100)),
    )
)
RUNNING = ("lookup", "head")


def rates(names: tuple[str, ...]) -> list[float]:
    merged = Credit.of(STATE, DRAFTS, RUNNING).with_counts(STATE, names).acceptance
    return [round(cell.hits / cell.total, 2) for cell in merged]


def test_the_rates_of_fewer_drafts_follow_from_the_credit() -> None:
    assert rates(RUNNING) == [0.7, 0.7, 0.9]
    assert rates(()) == [0.5, 0.5], "the own draft has no part in the extension"
    assert rates(("lookup",)) == [0.7, 0.7, 0.9]
    assert rates(("head",))[:2] == [0.5, 0.5]


def test_a_draft_without_credit_is_left_out_with_certainty() -> None:
    credit = Credit.of(STATE, DRAFTS, RUNNING)
    error = {
        names: credit.error(names, credit.acceptance(STATE, names, 2, 1))[1, True, 0] ** 0.5
        for names in (("lookup",), ("head",))
    }
    assert error["lookup",] < 0.02 < error["head",]


def test_a_lookup_extends_the_main_path_where_it_has_a_match() -> None:
    credit = Credit.of(STATE, DRAFTS, RUNNING)
    tokens, nodes = credit.extension(RUNNING, 2, 0.49)
    assert (round(tokens, 3), round(nodes, 2)) == (round(0.49 * 90 / 490, 3), 0.8)
    assert credit.extension(("head",), 2, 0.49) == credit.extension(RUNNING, 0, 1.0) == (0.0, 0.0)


cells = any_credit(TASK, [COMMON, OWN, HEAD, "l"], ranks=4, size=12)


@given(cells, st.integers(1, 3))
def test_any_counts_give_rates_of_every_subset(drawn: list[CreditCell], top_k: int) -> None:
    learned = LearnedState(credit=tuple(drawn))
    credit = Credit.of(learned, DRAFTS, RUNNING)
    for names in subsets_of(RUNNING):
        model = credit.acceptance(learned, names, 4, top_k)
        assert all(0 < rate.mean < 1 and rate.variance >= 0 for level in model.main for rate in level)
        assert all(variance >= 0 for variance in credit.error(names, model).values())
        assert min(credit.extension(names, 2, 0.5)) >= 0
    assert 0 <= credit.share_of_accepted(RUNNING) <= 1


# --- deployments without merged drafts ----------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [[], [{"name": TASK}]], ids=["no tasks", "a task"])
def test_nothing_changes_without_merged_drafts(tasks: list[dict[str, Any]]) -> None:
    """The stage returns the same state and the same deployment, so the plan and the stored text are those before it."""
    loop = loop_over(speculation={"tasks": tasks, "drafts": [{"name": "lookup", "method": "ngram"}]})
    decision = loop.polls(4)
    learned, deployment = loop.memory.learned, loop.deployment
    observed = Observation(workload=None, workers=(), session=loop.memory)
    merged = choose_merges(deployment, observed, learned, Delta(draft=OWN), buckets_for(16), now=loop.now)
    assert merged.learned is learned
    assert merged.deployment is deployment
    assert (merged.changes, merged.texts, decision.shown.merges) == ((), {}, {})
    assert (learned.merges, learned.credit) == ((), ())


def test_a_spec_that_stops_to_merge_leaves_nothing_behind() -> None:
    learned = learnt(polled()).model_copy(update={"merges": (MergeChoice(task=TASK, drafts=(), declared=("head",)),)})
    observed = Observation(workload=None, workers=(), session=loop_over().memory)
    merged = choose_merges(deployment_with(), observed, learned, None, buckets_for(16), now=1)
    assert (merged.learned.credit, merged.learned.merges) == ((), ())
