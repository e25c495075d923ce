"""Trials and probes of a row: what begins them, how often they are repeated, and what ends them."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.planning.acceptance import bounds_of
from specdecode_operator.state.learned import LearnedState, LoadState, RowState
from support.operators.estimates import FULL, OFF, chances, cost, depths_of, planned, spec, truth


def test_speculation_that_comes_back_untimed_is_a_probe() -> None:
    elsewhere = tuple(cell for cell in FULL if cell.values[5] > 200)
    learned = LearnedState(
        acceptance=chances(0.9), costs=(cost(1, 0, truth(1, 0)), *elsewhere), rows=(OFF,), load=LoadState(at=2000)
    )
    back = planned(spec(), learned).rows[0]
    assert (back.depth > 0, back.trial) == (True, True)
    timed = learned.model_copy(update={"costs": FULL})
    back = planned(spec(), timed).rows[0]
    assert (back.depth, back.trial) == (5, False)


def test_a_trial_in_vain_is_not_repeated() -> None:
    """Without bursts a deeper chain can be known by running it alone; here each disappoints."""
    quiet = spec(limits={"explore_percent": 0})
    learned = LearnedState(acceptance=chances(0.93), costs=tuple(cost(1, depth, truth(1, depth)) for depth in (0, 3)))
    begun, now = list[int](), 2000.0
    while now < 2000 + 3600:
        trying = next((row for row in learned.rows if row.trial), None)
        slow = (
            (cost(1, trying.depth, (4 if trying.depth > 3 else 1) * truth(1, trying.depth), at=now),) if trying else ()
        )
        learned = learned.model_copy(update={"load": LoadState(at=now), "costs": (*learned.costs, *slow)})
        rows = planned(quiet, learned, now).rows
        begun += [rows[0].depth] if rows[0].trial and not trying else []
        learned, now = learned.model_copy(update={"rows": rows}), now + 30
    assert begun
    assert len(begun) == len(set(begun)), "each depth at most once"
    assert learned.rows[0].depth == 3


def test_a_trial_compares_the_shape_with_the_one_before() -> None:
    """Plain steps looked short for a moment, minutes ago: no reason to stop after a trial of something else."""
    trial = RowState(concurrency=0, context=0, task="other", depth=5, since=1970, before=(0, 1, 2), moves=(1970,))
    costs = (cost(1, 0, 0.0145, count=20), cost(1, 3, truth(1, 3)), cost(1, 5, 1.5 * truth(1, 5), at=1999))
    learned = LearnedState(acceptance=chances(0.5), costs=costs, rows=(trial,), load=LoadState(at=2000), wander=0.04)
    after = planned(spec(), learned).rows[0]
    assert (after.depth, after.trial) == (3, False)


@pytest.mark.parametrize(
    ("before", "narrower"), [((0, 1, 2), {"depth": {"max": 2}}), ((0, 0), {"tree": {"topK": 1}})], ids=["depth", "topK"]
)
def test_a_trial_ends_within_the_bounds_that_the_spec_has_by_then(
    before: tuple[int, ...], narrower: dict[str, Any]
) -> None:
    trial = RowState(concurrency=0, context=0, task="other", depth=1, since=1900, before=before, moves=(1900,))
    learned = LearnedState(acceptance=chances(0.9), costs=FULL, rows=(trial,), load=LoadState(at=2000))
    speculation = spec(**narrower)
    after = planned(speculation, learned).rows[0]
    assert not after.trial
    assert bounds_of(speculation, "other").nearest(after.shape) == after.shape


def off(load_at: float) -> LearnedState:
    return LearnedState(acceptance=chances(0.05), costs=FULL, rows=(OFF,), load=LoadState(at=load_at))


def test_a_probe_when_speculation_was_not_measured_for_long() -> None:
    assert depths_of(spec(), off(1300), now=1300)[0] == 0
    assert depths_of(spec(), off(2500), now=2500)[0] > 0
    assert depths_of(spec(), off(2400), now=2500)[0] == 0, "an idle deployment learns nothing from a probe"
    worse = off(2500).model_copy(update={"acceptance": chances(0.05), "costs": tuple(DEAR)})
    assert depths_of(spec(), worse, now=2500)[0] == 0, "the more it loses, the later it is tried again"


DEAR = [cost(1, depth, 0.02 + (0.02 + 0.002 * depth if depth else 0)) for depth in range(6)]


def test_a_probe_runs_until_it_was_measured() -> None:
    learned = off(2500)
    probing = planned(spec(), learned, 2500).rows
    assert (probing[0].trial, probing[0].moves) == (True, (2500.0,))
    learned = learned.model_copy(update={"rows": probing})
    assert depths_of(spec(), learned, now=2510)[0] == probing[0].depth > 0
    fresh = cost(1, probing[0].depth, truth(1, probing[0].depth), at=2521)
    learned = learned.model_copy(update={"costs": (cost(1, 0, 0.0204), fresh)})
    after = planned(spec(), learned, 2522).rows[0]
    assert (after.depth, after.trial, after.moves) == (0, False, (2500.0,)), "the end is no change of its own"


def test_a_probe_that_nothing_measures_ends_after_a_minute() -> None:
    learned = off(2500)
    probing = planned(spec(), learned, 2500).rows
    after = planned(spec(), learned.model_copy(update={"rows": probing}), 2561).rows[0]
    assert (after.depth, after.trial) == (0, False)
