"""Acceptance by context: a draft knows contexts of the lengths that it was trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdecode_operator.decision.learn import learn_delta
from specdecode_operator.planning.acceptance import AcceptanceModel
from specdecode_operator.planning.estimates import buckets_for, context_rates
from specdecode_operator.state.learned import ContextCell, LearnedState, LoadState, with_draft
from specdecode_operator.telemetry.counters import Delta, Hits
from support.operators.estimates import FULL, chances, planned, spec

BUCKETS = buckets_for(16)
LONG_STEPS = tuple(cost.model_copy(update={"context_bucket": 2}) for cost in FULL)


def cell(context: int, rate: float, total: float = 4000) -> ContextCell:
    return ContextCell(task="other", depth=1, context=context, hits=rate * total, total=total, at=1000)


def learned(*cells: ContextCell, mean: float = 0.6) -> LearnedState:
    return LearnedState(
        acceptance=chances(mean, total=4000), costs=(*FULL, *LONG_STEPS), contexts=cells, load=LoadState(at=2000)
    )


def depths(state: LearnedState) -> dict[tuple[int, int], int]:
    rows = planned(spec(tree={"topK": 1}), state).rows
    return {(row.concurrency, row.context): row.depth for row in rows}


def test_a_draft_that_knows_short_contexts_alone_is_used_there_alone() -> None:
    apart = depths(learned(cell(0, 0.85), cell(2, 0.05)))
    assert apart[0, 0] > 2
    assert apart[0, 2] == 0
    alike = depths(learned())
    assert alike[0, 0] == alike[0, 2] > 0


def test_rates_move_by_their_odds_and_ranks_keep_their_share_of_the_misses() -> None:
    model = AcceptanceModel(learned(cell(0, 0.8), cell(2, 0.2)), spec())
    pooled, short, long = model.of("other"), model.of("other", 0), model.of("other", 2)
    assert short.main[0][0].mean == pytest.approx(0.8, abs=0.02)
    assert long.main[0][0].mean == pytest.approx(0.2, abs=0.02)
    for depth in range(5):
        for moved in (short, long):
            ranks, before = moved.main[depth], pooled.main[depth]
            assert ranks[0].odds / before[0].odds == pytest.approx(moved.main[0][0].odds / pooled.main[0][0].odds)
            assert [rate.mean for rate in ranks] == sorted((rate.mean for rate in ranks), reverse=True)
            assert sum(rate.mean for rate in ranks) < 1


def test_tokens_of_one_context_alone_change_nothing() -> None:
    model = AcceptanceModel(learned(cell(0, 0.9)), spec())
    assert model.of("other", 0).main == model.of("other").main


def test_a_context_that_was_hardly_seen_is_in_doubt_and_not_far_off() -> None:
    few = AcceptanceModel(learned(cell(0, 0.6), cell(2, 0.0, total=8)), spec()).of("other", 2).main[0][0]
    many = AcceptanceModel(learned(cell(0, 0.6), cell(2, 0.0)), spec()).of("other", 2).main[0][0]
    assert many.mean < 0.1 < 0.4 < few.mean
    assert few.variance > 10 * many.variance


def test_counts_by_context_are_learnt_forgotten_and_parked_with_the_draft() -> None:
    state = LearnedState(draft="d1")
    delta = Delta(
        draft="d1",
        seconds=5,
        acceptance={("other", 1): Hits(70, 200)},
        contexts={("other", 0): Hits(60, 100), ("other", 2): Hits(10, 100)},
    )
    for now in range(1000, 1100, 5):
        state = learn_delta(state, replace(delta, at=now), now=now)
    rates = {cell.context: cell.hits / cell.total for cell in state.contexts}
    assert rates == {0: pytest.approx(0.6, abs=0.01), 2: pytest.approx(0.1, abs=0.01)}
    assert max(cell.total for cell in state.contexts) <= 2000
    other = with_draft(state, "d2")
    assert other.contexts == ()
    back = with_draft(other, "d1")
    assert {cell.context for cell in back.contexts} == {0, 2}


def test_status_has_contexts_of_tasks_that_were_seen_in_several() -> None:
    cells = (cell(0, 0.6), cell(2, 0.1), cell(1, 0.5, total=10), cell(0, 0.6).model_copy(update={"task": "code"}))
    assert context_rates(BUCKETS, cells) == {"other": {"<=1024": 0.6, ">8192": 0.1}}
