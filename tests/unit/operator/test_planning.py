"""Parts of the planner: estimates, the step-time model, and properties that hold for any memory."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.measurements import PAIRS, CellKey, Delta, Hits, K, Moments, RequestSums
from specdecode_operator.memory import CostMemory, DepthMemory, Kept, LoadMemory, RowMemory
from specdecode_operator.planning import buckets, choose, learn
from specdecode_operator.planning.acceptance import Chance, chain, expected_tokens, gradient
from specdecode_operator.planning.linear import inverse, product
from specdecode_operator.planning.loads import Load, bucket_of, bucket_text
from specdecode_operator.planning.rows import LONGEST_PATIENCE_SECONDS
from specdecode_operator.planning.steptime import Seconds, StepTimes, features, ordered


def moments(x: tuple[float, ...], seconds: float, count: float = 100, spread: float = 0.02) -> Moments:
    """Steps that all look like ``x`` and take ``seconds``, more or less."""
    squared = seconds**2 * (1 + spread**2)
    emitted = x[1]
    values = (count, count * seconds, count * squared, count * emitted)
    sums = (*(count * v for v in x), *(count * v * seconds for v in x), *(count * x[i] * x[j] for i, j in PAIRS))
    return Moments((*values, *sums))


def cost(sequences: float, depth: int, seconds: float, *, count: float = 100, at: float = 1000) -> CostMemory:
    x = features(Load(sequences, 500), depth)
    bucket = 1 << max(0, math.ceil(math.log2(x[2])))
    return CostMemory(
        tokens_bucket=bucket,
        draft_passes=depth,
        prefill=False,
        context_bucket=0,
        values=moments(x, seconds, count).values,
        at=at,
    )


def truth(sequences: float, depth: int) -> float:
    return 0.02 + 0.002 * depth + 0.0004 * sequences * (depth + 1)


def chances(p: float, depth: int = 5, total: float = 1000) -> tuple[DepthMemory, ...]:
    return tuple(DepthMemory(task="other", depth=d, hits=p * total, total=total, at=1000) for d in range(1, depth + 1))


def spec(**fields: Any) -> SpeculationSpec:
    return SpeculationSpec.model_validate({"method": "eagle3", "draft": {"uri": "embedded://d"}, **fields})


# --- estimates ----------------------------------------------------------------------------------------------------


def test_inverse() -> None:
    matrix = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]]
    columns = [product(matrix, column) for column in zip(*inverse(matrix), strict=True)]
    assert all(columns[i][j] == pytest.approx(float(i == j), abs=1e-12) for i in range(3) for j in range(3))
    with pytest.raises(ValueError, match="positive definite"):
        inverse([[1.0, 2.0], [2.0, 1.0]])


def test_expected_tokens_and_its_slope() -> None:
    found = [Chance(0.8, 0), Chance(0.5, 0), Chance(0.5, 0)]
    assert expected_tokens(found) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    for index in range(3):
        nudged = [Chance(c.p + 1e-6 * (i == index), 0) for i, c in enumerate(found)]
        slope = (math.log(expected_tokens(nudged)) - math.log(expected_tokens(found))) / 1e-6
        assert gradient(found, 3)[index] == pytest.approx(slope, rel=1e-4)


def test_unseen_depths_lean_on_the_one_before_and_say_that_they_are_unsure() -> None:
    found = chain(Kept(acceptance=chances(0.8, depth=2)), None, 4)
    assert found[3].p == pytest.approx(0.8, abs=0.02)
    assert found[3].variance > 20 * found[1].variance


def test_a_task_leans_on_all_tasks_until_it_has_shown_itself() -> None:
    few = DepthMemory(task="code", depth=1, hits=2, total=2, at=0)
    many = few.model_copy(update={"hits": 900.0, "total": 1000.0})
    pooled = chances(0.5)
    assert chain(Kept(acceptance=(*pooled, few)), "code", 1)[0].p < 0.6
    assert chain(Kept(acceptance=(*pooled, many)), "code", 1)[0].p > 0.85


def test_tokens_of_one_request_resemble_each_other_so_errors_grow() -> None:
    kept = Kept(acceptance=chances(0.5))
    # 50 requests of 100 drafts each; half of them accept everything, half nothing.
    clustered = RequestSums(50, 25 * 100, 50 * 100, 25 * 100**2, 25 * 100**2, 50 * 100**2)
    other = learn(kept, Delta(requests={"other": clustered}), now=1000)
    assert chain(other, None, 1)[0].variance > 5 * chain(kept, None, 1)[0].variance


@pytest.mark.parametrize(("drafts", "polls"), [(100, 10), (2000, 6)])
def test_a_step_of_acceptance_is_followed_within_1000_drafts_or_30_seconds(drafts: int, polls: int) -> None:
    kept, now = Kept(draft="d"), 0.0
    for rate, count in ((0.9, 30), (0.6, polls)):
        for _ in range(count):
            now += 5
            hits = Hits(round(rate * drafts), drafts)
            kept = learn(kept, Delta(draft="d", acceptance={("other", 1): hits}), now=now)
    assert kept.acceptance[0].hits / kept.acceptance[0].total == pytest.approx(0.6, abs=0.05)


def test_a_new_draft_starts_from_nothing_but_plain_steps() -> None:
    kept = Kept(draft="old", acceptance=chances(0.9), costs=(cost(1, 0, 0.02), cost(1, 3, 0.03)))
    after = learn(kept, Delta(draft="new"), now=0)
    assert (after.acceptance, [cell.draft_passes for cell in after.costs]) == ((), [0])


def test_a_cost_that_jumps_is_believed_at_once() -> None:
    key = CellKey(4, 3, False, 0)
    kept = Kept(costs=(cost(1, 3, 0.03, count=5000),))
    after = learn(kept, Delta(steps={key: moments(features(Load(1, 500), 3), 0.1, 50)}), now=1005)
    assert Moments(after.costs[0].values).mean_seconds > 0.08


def test_prefill_steps_teach_nothing_about_decoding() -> None:
    delta = Delta(steps={CellKey(64, 0, True, 0): moments((1, 1, 1, 100, 0, 63), 0.5)})
    assert learn(Kept(), delta, now=0).costs == ()


# --- step time ----------------------------------------------------------------------------------------------------


def test_the_model_finds_what_it_was_not_shown() -> None:
    shown = [(1, 0), (1, 1), (1, 3), (1, 5), (4, 0), (4, 3), (8, 1)]
    times = StepTimes.fit([cost(n, d, truth(n, d)) for n, d in shown])
    assert times is not None
    found = times.predict(Load(4, 500), 5, 0)
    assert found.steps == 0
    assert found.mean == pytest.approx(truth(4, 5), rel=0.1)


def test_one_depth_alone_says_little_about_others() -> None:
    times = StepTimes.fit([cost(1, 3, 0.04)])
    assert times is not None
    own, other = times.predict(Load(1, 500), 3, 0), times.predict(Load(1, 500), 0, 0)
    assert math.sqrt(own.variance) < 0.05 * own.mean
    assert math.sqrt(other.variance) > 0.2 * other.mean


def test_a_visited_cell_overrules_the_line() -> None:
    """Time that jumps at a depth is no line; the cell's own mean says so."""
    costs = [cost(1, d, 0.02 + 0.001 * d + (0.1 if d >= 3 else 0)) for d in range(6)]
    times = StepTimes.fit(costs)
    assert times is not None
    assert times.predict(Load(1, 500), 2, 0).mean == pytest.approx(0.022, rel=0.12)
    assert times.predict(Load(1, 500), 3, 0).mean == pytest.approx(0.123, rel=0.12)


def test_steps_with_a_shadow_are_not_mistaken_for_deeper_chains() -> None:
    shadowed = cost(1, 3, 0.03).model_copy(update={"draft_passes": 5})
    times = StepTimes.fit([shadowed])
    assert times is not None
    assert times.predict(Load(1, 500), 5, 0).steps == 0


def test_deeper_never_costs_less_and_the_later_reading_is_right() -> None:
    def timed(mean: float, at: float) -> Seconds:
        return Seconds(mean, 1e-6, 10, at)

    rising = ordered([timed(0.02, 1), timed(0.03, 1), timed(0.1, 9), timed(0.04, 1)])
    assert [found.mean for found in rising] == [0.02, 0.03, 0.1, 0.1]
    falling = ordered([timed(0.02, 1), timed(0.1, 1), timed(0.1, 1), timed(0.03, 9)])
    assert [found.mean for found in falling] == [0.02, 0.03, 0.03, 0.03]


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=8), st.randoms())
def test_ordered_times_rise_and_keep_the_newest(means: list[float], random: Random) -> None:
    ages = random.sample(range(len(means)), len(means))
    found = [Seconds(mean, 1e-6, 10, at) for mean, at in zip(means, ages, strict=True)]
    rising = ordered(found)
    assert [seconds.mean for seconds in rising] == sorted(seconds.mean for seconds in rising)
    newest = ages.index(max(ages))
    assert rising[newest] == found[newest]


# --- buckets ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1024))
def test_buckets_end_where_the_worker_does(most: int) -> None:
    edges = buckets(most).concurrency
    assert edges[-1] < max(most, 2)
    assert bucket_of(edges, most) == (len(edges) if most > 1 else 0)


def test_loads_in_words() -> None:
    found = buckets(16)
    assert bucket_text(found, 0, 0) == "concurrency 1, context <=1024"
    assert bucket_text(found, 2, 1) == "concurrency 3-4, context 1025-8192"
    assert bucket_text(found, 4, 2) == "concurrency >8, context >8192"


# --- rows ---------------------------------------------------------------------------------------------------------

FULL = tuple(cost(n, d, truth(n, d)) for n in (1, 4, 16) for d in range(6))


def depths_of(speculation: SpeculationSpec, kept: Kept, now: float = 2000.0) -> list[int]:
    return [row.depth for row in choose(speculation, kept, buckets(16), max_num_seqs=16, now=now).rows]


def test_nothing_known_keeps_the_initial_depth() -> None:
    assert set(depths_of(spec(), Kept())) == {3}


def test_good_drafts_go_deep_and_bad_ones_do_not_run() -> None:
    assert depths_of(spec(), Kept(acceptance=chances(0.95), costs=FULL))[0] == 5
    assert depths_of(spec(), Kept(acceptance=chances(0.02), costs=FULL))[0] == 0


def test_low_confidence_stays() -> None:
    few = tuple(cell.model_copy(update={"hits": 1.0, "total": 2.0}) for cell in chances(0.5))
    assert depths_of(spec(depth={"initial": 2}), Kept(acceptance=few, costs=(cost(1, 2, 0.03),)))[0] == 2


def test_the_dwell_holds_unless_speculation_loses() -> None:
    slow = spec(hysteresis={"minDwellSeconds": 600}, depth={"max": 5})
    moved = RowMemory(concurrency=0, context=0, task="other", depth=2, since=1900)
    assert depths_of(slow, Kept(acceptance=chances(0.95), costs=FULL, rows=(moved,)))[0] == 2
    assert depths_of(slow, Kept(acceptance=chances(0.02), costs=FULL, rows=(moved,)))[0] == 0
    assert depths_of(slow, Kept(acceptance=chances(0.95), costs=FULL, rows=(moved,)), now=2600)[0] == 5


def test_speculation_is_not_stopped_where_the_bounds_forbid_it() -> None:
    bounded = spec(depth={"min": 1})
    assert depths_of(bounded, Kept(acceptance=chances(0.02), costs=FULL))[0] == 1


def test_patience_grows_each_time_it_was_in_vain() -> None:
    row, waits, now = RowMemory(concurrency=0, context=0, task="other", depth=3, since=1), [], 5000.0
    for _ in range(9):
        kept = Kept(acceptance=chances(0.02), costs=FULL, rows=(row.model_copy(update={"depth": 3}),))
        stopped = choose(spec(), kept, buckets(16), max_num_seqs=16, now=now).rows[0]
        assert stopped.depth == 0
        waits.append(stopped.patience)
        row, now = stopped.model_copy(update={"since": stopped.off_until}), stopped.off_until + 1
    assert waits[:4] == [60, 120, 240, 480]
    assert waits[-1] == LONGEST_PATIENCE_SECONDS


OFF = RowMemory(concurrency=0, context=0, task="other", depth=0, since=1000, off_until=1060, patience=60)


def off(load_at: float) -> Kept:
    return Kept(acceptance=chances(0.05), costs=FULL, rows=(OFF,), load=LoadMemory(at=load_at))


def test_a_probe_after_patience_when_nothing_new_is_known() -> None:
    assert depths_of(spec(), off(1050), now=1050)[0] == 0
    assert depths_of(spec(), off(1500), now=1500)[0] > 0
    assert depths_of(spec(), off(1400), now=1500)[0] == 0, "an idle deployment learns nothing from a probe"


def test_a_probe_runs_until_it_was_measured() -> None:
    kept = off(1500)
    probing = choose(spec(), kept, buckets(16), max_num_seqs=16, now=1500).rows
    kept = kept.model_copy(update={"rows": probing})
    assert depths_of(spec(), kept, now=1505)[0] == probing[0].depth > 0
    fresh = cost(1, probing[0].depth, truth(1, probing[0].depth), at=1515)
    kept = kept.model_copy(update={"costs": (*(c for c in FULL if c.at < 0), cost(1, 0, 0.0204), fresh)})
    after = choose(spec(), kept, buckets(16), max_num_seqs=16, now=1516).rows[0]
    assert (after.depth, after.probing) == (0, False)
    assert after.patience > 60


def test_a_task_gets_rows_once_it_was_seen() -> None:
    tasks = spec(tasks=[{"name": "code"}])
    code = tuple(cell.model_copy(update={"task": "code"}) for cell in chances(0.95))
    seen = choose(tasks, Kept(acceptance=(*chances(0.02), *code), costs=FULL), buckets(16), max_num_seqs=16, now=2000)
    first = {row.task: row.depth for row in seen.rows if (row.concurrency, row.context) == (0, 0)}
    assert first == {"other": 0, "code": 5}
    unseen = choose(tasks, Kept(acceptance=chances(0.5), costs=FULL), buckets(16), max_num_seqs=16, now=2000)
    assert {row.task for row in unseen.rows} == {"other"}


rates = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e5)), max_size=8)
times = st.lists(st.tuples(st.floats(0.5, 64), st.integers(0, 8), st.floats(1e-5, 10), st.floats(1, 1e5)), max_size=12)
bounds = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8)).map(sorted)


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
    speculation = spec(depth={"min": low, "max": high, "initial": initial}, hysteresis={"minDwellSeconds": 0})
    kept = Kept(
        acceptance=tuple(
            DepthMemory(task="other", depth=d, hits=p * n, total=n, at=1) for d, (p, n) in enumerate(rate, start=1)
        ),
        costs=tuple({(c.tokens_bucket, c.draft_passes): c for c in (cost(*t[:3], count=t[3]) for t in timed)}.values()),
        rows=(RowMemory(concurrency=0, context=0, task="other", depth=depth, since=since),),
    )
    now = 2e4
    seen = []
    for _ in range(6):
        chosen = choose(speculation, kept, buckets(16), max_num_seqs=16, now=now)
        assert all(low <= row.depth <= high for row in chosen.rows)
        kept, now = kept.model_copy(update={"rows": chosen.rows}), now + 1
        seen.append([row.depth for row in chosen.rows])
    assert seen[-1] == seen[-2], "constant input must reach a fixed point"


def test_features_are_those_of_the_contract() -> None:
    assert len(features(Load(2, 100), 3)) == K
    assert features(Load(2, 100), 3) == (1, 2, 8, 200, 3, 0)
