"""The depth of every row: what moves it, what holds it, trials and probes, and properties that hold for any memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.planning.acceptance import AcceptanceModel, Objective, bounds_of, tasks_at
from specdecode_operator.planning.estimates import Load, StepTimeModel, confidence
from specdecode_operator.planning.search import OUTDATED, Choice, ShapeSearch, next_row
from specdecode_operator.state.learned import AcceptanceCell, LearnedState, LoadState, RowState, TrafficCell
from specdecode_worker.contract import TreeShape
from support.operators.estimates import FULL, OFF, chances, cost, depths_of, planned, spec, truth


def test_a_machine_that_wanders_makes_nobody_sure() -> None:
    quiet = LearnedState(acceptance=chances(0.95), costs=FULL, wander=0)
    assert depths_of(spec(), quiet)[0] == 5
    assert depths_of(spec(), quiet.model_copy(update={"wander": 0.1}))[0] == 3


def test_the_first_change_waits_for_reliable_estimates() -> None:
    few = LearnedState(acceptance=chances(0.02, total=79), costs=FULL)
    assert set(depths_of(spec(), few)) == {3}
    enough = few.model_copy(update={"acceptance": chances(0.02, total=80)})
    assert depths_of(spec(), enough)[0] == 0
    held = planned(spec(), few, held_back={(0, 0)})
    assert {row.depth for row in held.rows} == {3}, "nor does it change where the guards decode plainly"
    changed = RowState(concurrency=0, context=0, task="other", depth=3, since=100)
    assert depths_of(spec(), few.model_copy(update={"rows": (changed,)}))[0] == 0, "later changes need no such start"


@pytest.mark.parametrize(
    ("spoken", "first"),
    [({}, 3), ({"depth": {"max": 2}}, 2), ({"depth": {"min": 4}}, 4), ({"tree": {"max_nodes": 2}}, 2)],
    ids=str,
)
def test_the_first_depth_is_within_the_bounds(spoken: dict[str, Any], first: int) -> None:
    """A spec of bounds alone starts at the usual depth or the nearest that it allows, in rows and in the plan."""
    assert set(depths_of(spec(**spoken), LearnedState())) == {first}
    assert spec(**spoken).initial == first


def test_a_load_that_nobody_has_seen_keeps_its_row() -> None:
    found = planned(spec(), LearnedState(acceptance=chances(0.02), costs=FULL)).rows
    moved = {row.concurrency for row in found if row.context == 0 and row.since}
    assert moved == {0, 2, 4}, "FULL has steps of 1, 4 and 16 sequences"
    assert all(row.depth == 3 for row in found if row.context)


def test_a_load_that_nobody_has_seen_is_no_deeper_than_the_one_below() -> None:
    def rows(depth: int) -> list[int]:
        measured = RowState(concurrency=1, context=0, task="other", depth=depth, since=1900)
        found = planned(spec(), LearnedState(rows=(measured,))).rows
        return [row.depth for row in found if row.context == 0]

    assert rows(1) == [3, 1, 1, 1, 1], "lower loads keep depth.initial"
    assert rows(5) == [3, 5, 3, 3, 3]


def test_who_follows_a_move_follows_in_the_same_plan() -> None:
    learned = LearnedState(acceptance=chances(0.02), costs=tuple(cost(1, depth, truth(1, depth)) for depth in range(6)))
    first = planned(spec(), learned)
    assert [row.depth for row in first.rows if row.context == 0] == [0, 0, 0, 0, 0]
    assert [(change.row.concurrency, change.before.depth) for change in first.changes] == [(at, 3) for at in range(5)]
    assert len({change.reason for change in first.changes}) == 1, "what follows has the reason of what it follows"
    after = learned.model_copy(update={"rows": first.rows})
    again = planned(spec(), after, 2005)
    assert again.rows == first.rows, "one change, one plan"


def test_who_follows_a_task_that_is_off_stays_within_its_own_bounds() -> None:
    code = chances(0.5, task="code")
    speculated = RowState(concurrency=0, context=0, task="other", depth=3, since=5)
    learned = LearnedState(acceptance=(*chances(0.5), *code), rows=(speculated,))
    bounded = spec(tasks=[{"name": "code"}, {"name": "other", "mode": "Off"}], depth={"min": 1})
    chosen = planned(bounded, learned)
    at_one = {row.task: row.depth for row in chosen.rows if (row.concurrency, row.context) == (0, 0)}
    assert at_one == {"other": 0, "code": 1}


def test_a_first_request_that_is_easy_takes_nobody_deeper_than_steps_were_timed() -> None:
    first = chances(0.93, depth=7, total=60)
    timed = [cost(1, depth, truth(1, depth)) for depth in (0, 3)]
    deep = spec(depth={"min": 0, "max": 7, "initial": 3})
    assert depths_of(deep, LearnedState(acceptance=first, costs=tuple(timed)))[0] == 3
    timed.append(cost(1, 7, truth(1, 7)))
    assert depths_of(deep, LearnedState(acceptance=chances(0.93, depth=7), costs=tuple(timed)))[0] > 3


def test_without_bursts_a_deeper_chain_is_tried_before_it_is_believed() -> None:
    learned = LearnedState(
        acceptance=chances(0.93), costs=(cost(1, 0, truth(1, 0)), cost(1, 3, truth(1, 3))), load=LoadState(at=2000)
    )
    chosen = planned(spec(limits={"explore_percent": 0}), learned)
    assert chosen.rows[0].depth > 3
    assert chosen.rows[0].trial


def _search(learned: LearnedState) -> tuple[ShapeSearch, Choice, Choice]:
    """Return the search at one sequence, and the chains of 1 and 3."""
    times, load = StepTimeModel.fit(learned.costs), Load(1, 500)
    rows = [RowState(concurrency=0, context=0, task="other", depth=1)]
    search = ShapeSearch(times, load, tasks_at(AcceptanceModel(learned, spec()), rows, load, None), Objective())
    one, three = search.evaluate((("other", TreeShape.chain(depth)),) for depth in (1, 3)).values()
    return search, one, three


def test_few_drafts_leave_doubt_about_acceptance() -> None:
    def sure(total: float) -> float:
        search, one, three = _search(LearnedState(acceptance=chances(0.6, total=total), costs=FULL))
        return confidence(search.gain(one, three), search.gain_error(one, three))

    assert sure(4000) > 0.9 > sure(4)


def test_few_drafts_and_few_requests_are_one_doubt() -> None:
    def variance(total: float, arrivals: float) -> float:
        traffic = (TrafficCell(task="other", sums=(arrivals, arrivals, 0, 0, 1)),)
        search, one, three = _search(LearnedState(acceptance=chances(0.6, total=total), costs=FULL, traffic=traffic))
        exact = [replace(choice, seconds=choice.seconds._replace(variance=0)) for choice in (one, three)]
        return search.gain_error(*exact) ** 2

    drafts, requests = variance(10, 1e9), variance(1e9, 4)
    assert variance(10, 4) == pytest.approx(max(drafts, requests), rel=0.01)
    assert min(drafts, requests) > 0.2 * max(drafts, requests), "or their sum would be as good"


def test_speculation_is_not_stopped_where_the_bounds_forbid_it() -> None:
    bounded = spec(depth={"min": 1})
    assert depths_of(bounded, LearnedState(acceptance=chances(0.02), costs=FULL))[0] == 1


@pytest.mark.parametrize(
    ("slower", "held", "depth"),
    [(1.06, False, 1), (1.06, True, 1), (1.1, False, 1), (1.1, True, 0), (1.3, False, 0), (1.3, True, 0)],
)
def test_what_loses_stops_when_it_is_sure_or_where_it_loses_a_lot_and_guards_run_plainly(
    slower: float, held: bool, depth: int
) -> None:
    one = spec(depth={"min": 0, "max": 1, "initial": 1})
    costs = (cost(1, 0, 0.02), cost(1, 1, 0.02 * 1.5 * slower))
    learned = LearnedState(acceptance=chances(0.5), costs=costs)
    guards = {(0, 0)} if held else set()
    assert planned(one, learned, held_back=guards).rows[0].depth == depth


@pytest.mark.parametrize(("held", "moves", "depth"), [(False, 0, 3), (True, 0, 1), (True, 12, 3)])
def test_what_the_guards_hold_back_makes_room_for_less_before_its_dwell_is_over(
    held: bool, moves: int, depth: int
) -> None:
    """Unless the hour has no changes left."""
    one = spec(limits={"min_dwell_seconds": 600, "max_changes_per_hour": 12})
    costs = (cost(1, 0, 0.02), cost(1, 1, 0.025), cost(1, 3, 0.04))
    row = RowState(concurrency=0, context=0, task="other", depth=3, since=1990, moves=(1990.0,) * moves)
    learned = LearnedState(acceptance=chances(0.6), costs=costs, rows=(row,))
    guards = {(0, 0)} if held else set()
    chosen = planned(one, learned, held_back=guards)
    assert chosen.rows[0].depth == depth
    assert {change.cause for change in chosen.changes} == ({"loses"} if depth == 1 else set())


@pytest.mark.parametrize(
    ("seconds", "depth"),
    [
        pytest.param((0.02, 0.025, 0.04), 1, id="the smaller is better"),
        pytest.param((0.02, 0.025, 0.03), 3, id="the larger is believed to be the best"),
        pytest.param((0.02, 0.0315, 0.045), 3, id="the smaller is no gain over plain"),
    ],
)
def test_there_is_less_only_where_it_is_believed_to_be_better(seconds: tuple[float, float, float], depth: int) -> None:
    one = spec(limits={"min_dwell_seconds": 600})
    costs = tuple(cost(1, depth, each) for depth, each in zip((0, 1, 3), seconds, strict=True))
    row = RowState(concurrency=0, context=0, task="other", depth=3, since=1990)
    learned = LearnedState(acceptance=chances(0.6), costs=costs, rows=(row,))
    assert planned(one, learned, held_back={(0, 0)}).rows[0].depth == depth


@pytest.mark.parametrize(
    ("moves", "depth"),
    [
        pytest.param((4930,), 5, id="the dwell is over"),
        pytest.param((4950,), 2, id="the dwell is not over"),
        pytest.param((4000, 4100, 4930), 2, id="the changes of the hour are used up"),
        pytest.param((1000, 4100, 4930), 5, id="the first was more than an hour ago"),
    ],
)
def test_the_dwell_and_the_changes_of_the_hour_bound_how_often_a_row_changes(
    moves: tuple[float, ...], depth: int
) -> None:
    row = RowState(concurrency=0, context=0, task="other", depth=2, since=moves[-1], moves=moves)
    better = LearnedState(acceptance=chances(0.95), costs=FULL, rows=(row,))
    limited = spec(limits={"min_dwell_seconds": 60, "max_changes_per_hour": 3})
    assert depths_of(limited, better, now=5000)[0] == depth
    loses = better.model_copy(update={"acceptance": chances(0.02)})
    assert depths_of(limited, loses, now=5000)[0] == 0, "they hold no stop up"


@pytest.mark.parametrize(
    ("since", "changed_at", "depth"),
    [
        pytest.param(1000, 0, 2, id="87 % are not sure"),
        pytest.param(1000, 4990, 4, id="but likely, and what it was chosen by has changed"),
        pytest.param(4000, 3990, 2, id="before it was chosen, long ago"),
        pytest.param(4930, 4900, 4, id="just before it was chosen, from the first evidence"),
        pytest.param(4930, 4920, 4, id="the same, as soon as the dwell allows"),
        pytest.param(4950, 4940, 2, id="within the dwell"),
        pytest.param(1000, 4390, 2, id="long ago, and nothing came of it"),
        pytest.param(4410, 4990, 2, id="the last move was less than ten minutes ago"),
        pytest.param(4390, 4990, 4, id="more than ten minutes ago"),
    ],
)
@pytest.mark.parametrize("what", ["acceptance", "costs"])
def test_a_shape_that_a_change_has_outdated_gives_way_to_less_evidence(
    what: str, since: float, changed_at: float, depth: int
) -> None:
    row = RowState(concurrency=0, context=0, task="other", depth=2, since=since, moves=(since,))
    learned = LearnedState(acceptance=chances(0.75, total=40), costs=FULL, rows=(row,))
    changed = tuple(cell.model_copy(update={"changed_at": changed_at}) for cell in getattr(learned, what))
    chosen = planned(spec(), learned.model_copy(update={what: changed}), 5000)
    assert chosen.rows[0].depth == depth
    assert [OUTDATED in change.reason for change in chosen.changes if change.row.concurrency == 0] == [True] * (
        depth == 4
    )


def test_of_a_batch_of_two_tasks_all_rows_have_to_be_outdated() -> None:
    def depths(*changed: str) -> list[int]:
        cells = tuple(
            cell.model_copy(update={"task": task, "changed_at": 4990 if task in changed else 0})
            for task in ("other", "code")
            for cell in chances(0.72, total=100)
        )
        rows = [RowState(concurrency=0, context=0, task=task, depth=2, since=1000) for task in ("code", "other")]
        mix = tuple(TrafficCell(task=task, sums=(500, 500, 500, 0, 50_000)) for task in ("other", "code"))
        learned = LearnedState(acceptance=cells, costs=FULL, rows=tuple(rows), traffic=mix)
        chosen = planned(spec(tasks=[{"name": "code"}]), learned, 5000)
        return [row.depth for row in chosen.rows if (row.concurrency, row.context) == (0, 0)]

    assert depths() == [2, 2]
    assert depths("code") == [2, 2], "an alarm of one task is too often a batch of other requests"
    assert depths("code", "other") == [4, 4]


def test_loads_without_traffic_are_looked_at_seldom() -> None:
    learned = LearnedState(acceptance=chances(0.95), costs=FULL, load=LoadState(sequences=1, at=2000), swept_at=1990)

    def moved(now: float) -> set[int]:
        found = planned(spec(), learned, now)
        return {change.row.concurrency for change in found.changes}

    assert moved(2000) == {0}, "the present one at any time"
    assert moved(2050) > {0}
    assert moved(1000) > {0}, "a clock that was set back hides nothing"


def test_an_idle_deployment_keeps_its_rows_within_the_bounds() -> None:
    """Without requests there are no measurements, and the planner decides nothing."""
    idle = LearnedState(acceptance=chances(0.95), costs=FULL, load=LoadState(sequences=1, at=1000), swept_at=1070)

    def depth(learned: LearnedState, most: int = 5, now: float = 9000) -> int:
        return depths_of(spec(depth={"max": most, "initial": min(3, most)}), learned, now)[0]

    assert depth(idle) == 3
    assert depth(idle, most=2) == 2, "bounds hold at once"
    assert depth(idle.model_copy(update={"load": LoadState(sequences=1, at=8999)})) == 5
    assert depth(idle.model_copy(update={"swept_at": 1050})) == 5, "the last measurements were never decided on"
    assert depth(idle, now=500) == 5, "a clock that was set back hides nothing"


def test_a_task_gets_rows_once_it_was_seen() -> None:
    tasks = spec(tasks=[{"name": "code"}])
    code = chances(0.95, task="code")
    mix = tuple(TrafficCell(task=task, sums=(500, 500, 500, 0, 50_000)) for task in ("other", "code"))
    learned = LearnedState(acceptance=(*chances(0.02), *code), costs=FULL, traffic=mix, wander=0)
    for now in (2000, 2100):
        seen = planned(tasks, learned, now)
        learned = learned.model_copy(update={"rows": seen.rows})
    first = {row.task: row.depth for row in seen.rows if (row.concurrency, row.context) == (0, 0)}
    assert first == {"other": 0, "code": 5}
    unseen = planned(tasks, LearnedState(acceptance=chances(0.5), costs=FULL))
    assert {row.task for row in unseen.rows} == {"other"}


rates = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e5)), max_size=8)
times = st.lists(st.tuples(st.floats(0.5, 64), st.integers(0, 8), st.floats(1e-5, 10), st.floats(1, 1e5)), max_size=12)
bounds = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8)).map(sorted)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(rates, times, bounds, st.integers(0, 16), st.floats(0, 1e4))
def test_within_bounds_for_any_memory_and_then_at_rest(
    rate: list[tuple[float, float]],
    timed: list[tuple[float, int, float, float]],
    bound: list[int],
    depth: int,
    since: float,
) -> None:
    """Whatever was measured, rows lie within the bounds; with nothing new measured, they move once and then rest."""
    low, initial, high = bound
    speculation = spec(depth={"min": low, "max": high, "initial": initial}, limits={"min_dwell_seconds": 0})
    learned = LearnedState(
        acceptance=tuple(
            AcceptanceCell(task="other", depth=d, hits=p * n, total=n, at=1) for d, (p, n) in enumerate(rate, start=1)
        ),
        costs=tuple({(c.tokens_bucket, c.draft_passes): c for c in (cost(*t[:3], count=t[3]) for t in timed)}.values()),
        rows=(RowState(concurrency=0, context=0, task="other", depth=depth, since=since),),
    )
    now = 2e4
    seen = []
    for _ in range(6):
        chosen = planned(speculation, learned, now)
        assert all(low <= row.depth <= high for row in chosen.rows)
        learned, now = learned.model_copy(update={"rows": chosen.rows}), now + 1
        seen.append([row.depth for row in chosen.rows])
    assert seen[-1] == seen[-2], "constant input must reach a fixed point"


# --- states of a row ------------------------------------------------------------------------------------------------


DRAFTS, PLAIN = TreeShape.chain(2), TreeShape.chain(0)
DRAFTING = RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,))
ON_TRIAL, STOPPED = DRAFTING.model_copy(update={"before": (0,)}), DRAFTING.model_copy(update={"depth": 0})


@pytest.mark.parametrize("row", [DRAFTING, ON_TRIAL, STOPPED], ids=["drafting", "trial", "off"])
def test_every_transition(row: RowState) -> None:
    for shape in (DRAFTS, PLAIN, row.shape):
        moved = next_row(row, shape, 200.0)
        assert (moved.shape, moved.moves, moved.trial) == (shape, (100.0, 200.0), False)
        assert moved.since == (100 if shape == row.shape else 200)
    trial = next_row(row, DRAFTS, 200.0, is_trial=True)
    assert (trial.trial, trial.settled_shape) == (True, row.shape)


def test_the_end_of_a_trial_is_no_change() -> None:
    stays = next_row(ON_TRIAL, ON_TRIAL.shape, 200.0, counts=False)
    assert (stays.since, stays.moves, stays.trial) == (100, (100.0,), False)


def test_times_of_a_clock_that_was_ahead_hold_nothing() -> None:
    """The node of the leader before was a day ahead."""
    ahead = 5000.0 + 86_400
    row = RowState(concurrency=0, context=0, task="other", depth=2, since=ahead, moves=(ahead,) * 3)
    better = LearnedState(acceptance=chances(0.95), costs=FULL, rows=(row,))
    limited = spec(limits={"min_dwell_seconds": 60, "max_changes_per_hour": 3})
    assert depths_of(limited, better, now=5000)[0] == 5
    trial = row.model_copy(update={"before": (), "moves": ()})
    after = planned(spec(), off(5000).model_copy(update={"rows": (trial,)}), 5000).rows[0]
    assert (after.depth, after.trial) == (0, False)


# --- trials and probes: what begins them, how often they are repeated, and what ends them -----------------------------


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
