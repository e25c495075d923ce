"""Estimates by draft: a change of the draft parks them, a change back restores them, a canary's are not lost."""

from __future__ import annotations

import pytest

from specdecode_operator.decision.learn import learn_delta, learn_parked
from specdecode_operator.state.learned import MAX_PARKED_DRAFTS, AcceptanceCell, LearnedState, RowState, StepTimeCell
from specdecode_operator.telemetry.counters import CellKey, Delta, Hits, Moments, RequestSums
from support.operators.fleet import Truth, loop_over

NOW = 1e6


def cost(passes: int) -> StepTimeCell:
    values = (50, 1.0, 0.0205, 50, *[1.0] * 33)
    return StepTimeCell(
        tokens_bucket=4,
        draft_passes=passes,
        prefill=False,
        context_bucket=0,
        values=values,
        new_values=values,
        at=NOW,
    )


def measured(draft: str = "d1") -> LearnedState:
    cell = AcceptanceCell(task="other", depth=1, hits=80, total=100, at=NOW, new_hits=3, new_total=4)
    row = RowState(concurrency=0, context=0, task="other", depth=3, since=NOW, moves=(NOW,))
    return LearnedState(uid="u", draft=draft, acceptance=(cell,), costs=(cost(0), cost(3)), rows=(row,))


def seen(draft: str, rate: float = 0.5, **fields: object) -> Delta:
    return Delta(draft=draft, acceptance={("other", 1): Hits(100 * rate, 100)}, seconds=5, **fields)  # type: ignore[arg-type]


def acceptance(learned: LearnedState) -> float:
    (cell,) = learned.acceptance
    return cell.hits / cell.total


def test_a_new_draft_starts_from_nothing_but_plain_step_times() -> None:
    learned = learn_delta(measured(), Delta(draft="d2"), now=NOW)
    assert (learned.draft, learned.acceptance, learned.rows) == ("d2", (), ())
    assert learned.costs == (cost(0),)
    (parked,) = learned.parked
    assert parked.draft == "d1"
    assert [cell.draft_passes for cell in parked.costs] == [3]


def test_a_rollback_restores_the_estimates_and_rows() -> None:
    before = measured()
    learned = learn_delta(before, seen("d2"), now=NOW + 5)
    learned = learn_delta(learned, Delta(draft="d1"), now=NOW + 10)
    assert acceptance(learned) == acceptance(before)
    assert [cell.values for cell in learned.costs] == [cell.values for cell in before.costs]
    assert [row.shape for row in learned.rows] == [row.shape for row in before.rows]
    assert [parked.draft for parked in learned.parked] == ["d2"]
    assert parked_rate(learned, "d2") == pytest.approx(0.5)


def parked_rate(learned: LearnedState, draft: str) -> float:
    (parked,) = [one for one in learned.parked if one.draft == draft]
    return parked.acceptance[0].hits / parked.acceptance[0].total


def test_parked_estimates_have_no_short_term_evidence() -> None:
    """It would be taken for new when the draft comes back."""
    (parked,) = learn_delta(measured(), Delta(draft="d2"), now=NOW).parked
    assert (parked.acceptance[0].new_total, parked.costs[0].new_values, parked.rows[0].moves) == (0, (), ())


def test_the_least_recently_used_draft_is_dropped() -> None:
    learned = measured("d0")
    for index in range(1, MAX_PARKED_DRAFTS + 1):
        learned = learn_delta(learned, seen(f"d{index}"), now=NOW + index)
    assert [parked.draft for parked in learned.parked] == ["d3", "d2", "d1", "d0"]
    learned = learn_parked(learned, "d0", seen("d0"), NOW + 9)
    learned = learn_delta(learned, seen("d5"), now=NOW + 10)
    assert [parked.draft for parked in learned.parked] == ["d4", "d0", "d3", "d2"]


def test_a_canary_learns_its_own_estimates_only() -> None:
    before = measured()
    steps = {CellKey(4, passes, False, 0): Moments(cost(passes).values) for passes in (0, 2)}
    delta = seen("d2", 0.9, steps=steps, requests={"other": RequestSums(2, 8, 10, 40, 50, 60)})
    learned = before
    for tick in range(1, 5):
        learned = learn_parked(learned, "d2", delta, NOW + 5 * tick)
    assert parked_rate(learned, "d2") == pytest.approx(0.9, abs=0.01)
    (parked,) = learned.parked
    assert [cell.draft_passes for cell in parked.costs] == [2], "plain steps are learned with the current draft"
    assert parked.requests[0].sums[0] > 2
    assert learned.model_copy(update={"parked": ()}) == before
    adopted = learn_delta(learned, Delta(draft="d2"), now=NOW + 30)
    assert acceptance(adopted) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(("draft", "delta"), [("", seen("")), ("d1", seen("d1")), ("d2", Delta(draft="d2"))])
def test_nothing_is_parked_without_a_draft_or_measurements(draft: str, delta: Delta) -> None:
    before = measured()
    assert learn_parked(before, draft, delta, NOW) == before


def test_a_draft_that_measured_nothing_is_not_parked() -> None:
    learned = learn_delta(LearnedState(uid="u", draft="d1", costs=(cost(0),)), Delta(draft="d2"), now=NOW)
    assert not learned.parked


def test_rows_from_before_the_first_draft_are_not_parked() -> None:
    assert learn_delta(measured(""), Delta(draft="d1"), now=NOW).parked == ()


def test_a_rollback_in_the_loop_runs_the_old_depth_at_once() -> None:
    """Workers change their draft and back: the plan for the old draft is published with the first report."""
    loop = loop_over(Truth(chances=[0.98] * 5, sequences=3), explore=0.1)
    loop.polls(40)
    depth = loop.worker.depth
    assert depth == 5
    loop.worker.truth.draft = "d2"
    loop.worker.truth.chances = [0.05] * 5
    loop.polls(12)
    assert loop.memory.learned.draft == "d2"
    loop.worker.truth.draft = "d1"
    loop.worker.truth.chances = [0.98] * 5
    loop.poll()
    assert loop.worker.depth == depth
