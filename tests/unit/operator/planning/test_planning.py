"""Parts of the planner: estimates of acceptance, their change points, the step-time model, and loads."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.decision.learn import learn_delta
from specdecode_operator.planning.acceptance import Objective, Request, chain_rates, lacking
from specdecode_operator.planning.estimates import (
    MOST_LOADS,
    Batch,
    Estimate,
    Load,
    StepTimeModel,
    _rising,
    bucket_of,
    bucket_text,
    buckets_for,
    features,
    rate_changed,
    time_changed,
)
from specdecode_operator.scaling import step_pace
from specdecode_operator.state.learned import AcceptanceCell, LearnedState, RowState
from specdecode_operator.telemetry.counters import PAIRS, CellKey, Delta, Hits, K, Moments, RequestSums
from specdecode_worker.contract import FEATURES
from support.operators.estimates import FULL, chances, cost, moments, spec, truth

VERIFIED = 4 + FEATURES.index("verify_tokens")
"""Place of the verified tokens in the sums of a cell."""

# --- estimates ----------------------------------------------------------------------------------------------------


def test_unseen_depths_lean_on_the_one_before_and_say_that_they_are_unsure() -> None:
    found = chain_rates(LearnedState(acceptance=chances(0.8, depth=2)), None, 4)
    assert found[3].mean == pytest.approx(0.8, abs=0.02)
    assert found[3].variance > 20 * found[1].variance


@pytest.mark.parametrize(
    ("drafts", "steps", "made_up", "lack"),
    [
        (0, 100, 0, "acceptance rests on fewer than 20 independent drafts"),
        (79, 100, 0, "acceptance rests on fewer than 20 independent drafts"),
        (80, 100, 0, None),
        (80, 100, 93, "fewer than 8 steps were timed"),
        (0, 0, 0, "acceptance rests on fewer than 20 independent drafts and fewer than 8 steps were timed"),
    ],
    ids=["none", "few drafts", "enough", "only calibration", "nothing"],
)
def test_estimates_are_reliable_once_they_outweigh_their_priors(
    drafts: float, steps: float, made_up: float, lack: str | None
) -> None:
    """Before any request has finished, the tokens of one are taken to resemble each other: four count as one."""
    known = cost(1, 3, truth(1, 3), count=steps).model_copy(update={"made_up": made_up})
    assert lacking(LearnedState(acceptance=chances(0.9, total=drafts), costs=(known,))) == lack


def test_a_task_leans_on_all_tasks_until_it_has_shown_itself() -> None:
    few = AcceptanceCell(task="code", depth=1, hits=2, total=2, at=0)
    many = few.model_copy(update={"hits": 900.0, "total": 1000.0})
    pooled = chances(0.5)
    assert chain_rates(LearnedState(acceptance=(*pooled, few)), "code", 1)[0].mean < 0.6
    assert chain_rates(LearnedState(acceptance=(*pooled, many)), "code", 1)[0].mean > 0.85


def test_tokens_of_one_request_resemble_each_other_so_errors_grow() -> None:
    learned = LearnedState(acceptance=chances(0.5))
    # 50 requests of 100 drafts each; half of them accept everything, half nothing.
    clustered = RequestSums(50, 25 * 100, 50 * 100, 25 * 100**2, 25 * 100**2, 50 * 100**2)
    other = learn_delta(learned, Delta(requests={"other": clustered}), now=1000)
    assert chain_rates(other, None, 1)[0].variance > 3 * chain_rates(learned, None, 1)[0].variance
    alike = RequestSums(200, 200 * 50, 200 * 100, 200 * 50**2, 200 * 5000, 200 * 100**2)
    steady = learn_delta(learned, Delta(requests={"other": alike}), now=1000)
    assert chain_rates(steady, None, 1)[0].variance < 0.5 * chain_rates(learned, None, 1)[0].variance, (
        "two hundred that are alike"
    )


@pytest.mark.parametrize(("drafts", "polls"), [(100, 10), (2000, 6)])
def test_a_step_of_acceptance_is_followed_within_1000_drafts_or_30_seconds(drafts: int, polls: int) -> None:
    learned, now = LearnedState(draft="d"), 0.0
    for rate, count in ((0.9, 30), (0.6, polls)):
        for _ in range(count):
            now += 5
            hits = Hits(round(rate * drafts), drafts)
            learned = learn_delta(learned, Delta(draft="d", acceptance={("other", 1): hits}), now=now)
    assert learned.acceptance[0].hits / learned.acceptance[0].total == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("poll", [5.0, 15.0, 60.0])
def test_evidence_gathers_over_polls_of_any_length(poll: float) -> None:
    """Fourteen drafts a poll contradict nothing by themselves."""
    learned = LearnedState(draft="d", acceptance=chances(0.8, depth=1, total=2000))
    for index in range(1, 5):
        delta = Delta(draft="d", acceptance={("other", 1): Hits(4, 14)}, seconds=poll)
        learned = learn_delta(learned, delta, now=1000 + poll * index)
    assert learned.acceptance[0].changed_at > 0


def test_a_batch_that_contradicts_the_estimate_wins_at_once() -> None:
    learned = LearnedState(draft="d")
    for index, rate in enumerate([0.9] * 40 + [0.5]):
        fresh = Hits(round(rate * 100), 100)
        learned = learn_delta(learned, Delta(draft="d", acceptance={("other", 1): fresh}), now=5.0 * index)
    assert learned.acceptance[0].hits / learned.acceptance[0].total == pytest.approx(0.58, abs=0.02)


@pytest.mark.parametrize(("before", "after"), [(0.75, 0.45), (0.45, 0.8)])
def test_a_change_at_the_first_depth_leaves_little_of_what_was_known_of_deeper_ones(
    before: float, after: float
) -> None:
    """Deep drafts are seen seldom: the seventh would stay as it was for a quarter of an hour."""
    learned = LearnedState(draft="d", acceptance=chances(before, depth=7, total=400))
    for poll in range(1, 7):
        fresh = {("other", depth): Hits(round(after * 60), 60) for depth in (1, 2)}
        learned = learn_delta(learned, Delta(draft="d", acceptance=fresh), now=1000 + 5.0 * poll)
    found = [rate.mean for rate in chain_rates(learned, None, 7)]
    assert all(abs(p - after) < 0.5 * abs(before - after) for p in found)


def test_a_change_at_a_deep_depth_says_nothing_about_the_first() -> None:
    learned = LearnedState(
        draft="d", acceptance=(*chances(0.75, depth=3), AcceptanceCell(task="code", depth=3, hits=9, total=9, at=1))
    )
    after = learn_delta(learned, Delta(draft="d", acceptance={("other", 2): Hits(4, 40)}), now=1005)
    weight = {(cell.task, cell.depth): cell.total for cell in after.acceptance}
    assert weight["other", 1] == 1000
    assert weight["code", 3] == 9, "another task's draft may be as good as ever"
    assert weight["other", 3] < 10


def test_a_cost_that_jumps_is_believed_at_once() -> None:
    after = timed(LearnedState(costs=(cost(1, 3, 0.03, count=5000),)), 0.1, 50)
    assert Moments(after.costs[0].values).mean_seconds > 0.08


def test_prefill_steps_teach_nothing_about_decoding() -> None:
    delta = Delta(steps={CellKey(64, 0, True, 0): moments((1, 1, 1, 100, 0, 63), 0.5)})
    assert learn_delta(LearnedState(), delta, now=0).costs == ()


def timed(learned: LearnedState, seconds: float, count: float, now: float = 1005.0) -> LearnedState:
    """Return what is known after a poll with so many steps of a chain of three at one sequence."""
    steps = moments(features(Load(1, 500), 3), seconds, count)
    return learn_delta(learned, Delta(steps={CellKey(4, 3, False, 0): steps}), now=now)


def step(passes: int, load: Load, times: StepTimeModel) -> Estimate:
    """Step time of a chain."""
    batch = Batch(passes, passes + 1)
    return times.predict(load, [batch])[batch]


def rising(found: list[Estimate], lines: list[float] | None = None) -> list[Estimate]:
    """Step times of chains of rising depth."""
    order = [Batch(depth, depth + 1) for depth in range(len(found))]
    return _rising(order, lines or [0.02] * len(found), found)


# --- step time ----------------------------------------------------------------------------------------------------


def test_one_depth_alone_says_little_about_others() -> None:
    times = StepTimeModel.fit((cost(1, 3, 0.04),))
    own, other = step(3, Load(1, 500), times), step(0, Load(1, 500), times)
    assert math.sqrt(own.variance) < 0.05 * own.mean
    assert math.sqrt(other.variance) > 0.2 * other.mean


def test_a_visited_cell_overrules_the_line() -> None:
    """Time that jumps at a depth is no line; the cell's own mean says so."""
    costs = [cost(1, d, 0.02 + 0.001 * d + (0.1 if d >= 3 else 0)) for d in range(6)]
    times = StepTimeModel.fit(tuple(costs))
    assert step(2, Load(1, 500), times).mean == pytest.approx(0.022, rel=0.12)
    assert step(3, Load(1, 500), times).mean == pytest.approx(0.123, rel=0.12)


def test_steps_with_a_shadow_are_not_mistaken_for_deeper_chains() -> None:
    shadowed = cost(1, 3, 0.03).model_copy(update={"draft_passes": 5})
    times = StepTimeModel.fit((shadowed,))
    assert step(5, Load(1, 500), times).weight == 0


def test_deeper_never_costs_less_and_the_later_reading_is_right() -> None:
    def read(mean: float, at: float) -> Estimate:
        return Estimate(mean, 1e-6, 10, at)

    risen = rising([read(0.02, 1), read(0.03, 1), read(0.1, 9), read(0.04, 1)])
    assert [found.mean for found in risen] == [0.02, 0.03, 0.1, 0.1]
    falling = rising([read(0.02, 1), read(0.1, 1), read(0.1, 1), read(0.03, 9)])
    assert [found.mean for found in falling] == [0.02, 0.03, 0.03, 0.03]


def test_a_slight_contradiction_is_noise() -> None:
    """Check that step times which contradict each other by 1 % stay as they are, and that 13 % are corrected."""
    found = [Estimate(0.0402, 1e-6, 138, 805), Estimate(0.0398, 3.5e-6, 14, 280)]
    assert rising(found, [0.0367, 0.0407]) == found
    found[1] = found[1]._replace(mean=0.035)
    assert rising(found, [0.0367, 0.0407])[1].mean == pytest.approx(0.0402 * 0.0407 / 0.0367)


def test_a_time_carried_over_keeps_the_slope_and_admits_doubt() -> None:
    """Else a deeper chain would look free whenever a shallower one was timed on a busier machine."""
    plain, deeper = rising([Estimate(0.4, 1e-6, 10, 9), Estimate(0.3, 1e-6, 10, 1)], [0.2, 0.25])
    assert deeper.mean == pytest.approx(plain.mean * 0.25 / 0.2)
    assert math.sqrt(deeper.variance) > 0.1 * deeper.mean


def test_wander_is_learnt_from_means_that_move_beyond_noise() -> None:
    def after(factors: list[float]) -> float:
        learned = LearnedState(wander=0)
        for index, factor in enumerate(factors):
            learned = timed(learned, 0.03 * factor, 200, now=5.0 * index)
        return learned.wander

    assert after([1.0] * 30) < 1e-6
    assert after([1.0, 1.5] * 15) > 0.02
    assert after([1.0] * 20 + [5.0] + [5.0] * 9) < 0.01, "one step of cost is no wandering"


def test_steps_without_a_time_are_no_wandering() -> None:
    learned = LearnedState(costs=(cost(1, 3, 0.03),), wander=0.01)
    after = timed(learned, 0.0, 50)
    assert (after.wander, after.costs) == (0.01, learned.costs)


def test_a_neighbour_that_comes_again_is_no_change_of_cost() -> None:
    """Spells as long as a poll or two, twice as slow: the estimate stays between, whatever came last."""
    learned = LearnedState()
    for poll in range(60):
        factor = 2.2 if poll % 6 >= 4 else 1.0
        learned = timed(learned, 0.03 * factor, 100, now=5.0 * poll)
        found = Moments(learned.costs[0].values).mean_seconds / 0.03
        assert poll < 20 or 1.1 < found < 1.8, f"poll {poll}: {found:.2f}"
    assert learned.costs[0].polls > 15, "a mean over half a minute would be that of the last spell"


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=8), st.randoms())
def test_ordered_times_rise_and_keep_the_newest(means: list[float], random: Random) -> None:
    ages = random.sample(range(len(means)), len(means))
    found = [Estimate(mean, 1e-6, 10, at) for mean, at in zip(means, ages, strict=True)]
    risen = rising(found)
    assert all(deeper.mean >= 0.97 * shallower.mean for shallower, deeper in combinations(risen, 2))
    newest = ages.index(max(ages))
    assert risen[newest] == found[newest]


# --- buckets ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1024))
def test_buckets_end_where_the_worker_does(most: int) -> None:
    edges = buckets_for(most).concurrency
    assert edges[-1] < max(most, 2)
    assert bucket_of(edges, most) == (len(edges) if most > 1 else 0)


def test_steps_with_a_few_sequences_more_than_an_edge_are_of_the_bucket_below() -> None:
    """A mean of 2.04 comes from many steps with two sequences and a few with three."""
    found = buckets_for(8)
    times = StepTimeModel.fit((cost(2.04, 1, 0.015, count=500), cost(3.2, 1, 0.021, count=20)))
    typical = [round(times.typical(found, concurrency, 0, 8).sequences, 2) for concurrency in range(4)]
    assert typical == [1, 2.04, 3.2, 8]


def test_scaling_expects_of_a_mean_of_sequences_the_row_of_the_nearest_number() -> None:
    found, request = buckets_for(8), Request(100, 100, 150)
    deep = RowState(concurrency=1, context=0, task="other", depth=5, since=1)
    rows = (deep, deep.model_copy(update={"concurrency": 2, "depth": 0}))
    learned = LearnedState(acceptance=chances(0.8), costs=FULL, rows=rows)
    step_of = step_pace(spec(mode="Advisory"), learned, found, request, Objective(), kv_tokens=None)
    tokens = [step_of(sequences, 0).tokens for sequences in (2.0, 2.04, 2.6)]
    assert tokens[0] == tokens[1] > 2
    assert tokens[2] == 1


def test_a_model_remembers_few_loads() -> None:
    """Mean contexts of requests differ from poll to poll, and without a decoding step the model stays the same."""
    times = StepTimeModel.fit(FULL)
    for context in range(2 * MOST_LOADS):
        assert times.near(Load(1, context))
    assert len(times.nearby) <= MOST_LOADS


def test_loads_in_words() -> None:
    found = buckets_for(16)
    assert bucket_text(found, [(0, 0)]) == "concurrency 1, context <=1024"
    assert bucket_text(found, [(2, 1)]) == "concurrency 3-4, context 1025-8192"
    assert bucket_text(found, [(4, 2)]) == "concurrency >8, context >8192"
    several = bucket_text(found, [(1, 0), (0, 0), (2, 1)])
    assert several == "concurrency 2 or 1, context <=1024; concurrency 3-4, context 1025-8192"


def test_features_are_those_of_the_contract() -> None:
    assert len(features(Load(2, 100), 3)) == K
    assert features(Load(2, 100), 3) == (1, 2, 8, 200, 3, 0)


def test_the_first_pass_may_cost_what_further_ones_do_not() -> None:
    """A launch and the catching up come with drafting at all: a line through plain and chain:3 would miss them."""

    def seconds(sequences: float, depth: int) -> float:
        return 0.01 + (0.006 + 0.001 * depth if depth else 0) + 0.0002 * sequences * (depth + 1)

    shown = [cost(n, depth, seconds(n, depth), count=400) for n in (1, 4, 16) for depth in (0, 3, 5)]
    times = StepTimeModel.fit(tuple(shown))
    for sequences in (1, 4, 16):
        assert step(1, Load(sequences, 500), times).mean == pytest.approx(seconds(sequences, 1), rel=0.06)


def test_many_polls_say_more_than_one() -> None:
    def error(polls: float) -> float:
        found = StepTimeModel.fit((cost(1, 3, 0.03, count=400).model_copy(update={"polls": polls}),), wander=0.01)
        return step(3, Load(1, 500), found).variance

    assert error(16) < error(1)


def test_polls_are_counted_and_forgotten_with_their_steps() -> None:
    learned = LearnedState()
    for poll in range(400):
        learned = timed(learned, 0.03, 20, now=1000.0 + 5 * poll)
    (cell,) = learned.costs
    assert cell.polls == pytest.approx(cell.values[0] / 20, rel=0.05)


@pytest.mark.parametrize(
    ("places", "value"),
    [(slice(4 + 2 * K, None), -1e9), (slice(VERIFIED, VERIFIED + 1), 0.0)],
    ids=["moments that no steps can have", "steps that verified nothing"],
)
def test_impossible_sums_do_not_break_the_model(places: slice, value: float) -> None:
    cell = cost(1, 3, 0.03)
    values = [*cell.values]
    values[places] = [value if known else 0.0 for known in values[places]]
    times = StepTimeModel.fit((cell.model_copy(update={"values": tuple(values)}),))
    assert step(3, Load(1, 500), times).mean > 0


def test_where_neighbours_come_and_go_a_slow_poll_is_no_change() -> None:
    x = features(Load(1, 500), 3)
    before, slow = moments(x, 0.03, 100), moments(x, 0.045, 40)
    assert time_changed(before, slow)
    assert not time_changed(before, slow, wander=0.04)


# --- changes are told from chance: rarely where there is none, surely where there is one ------------------------------


def drafts(rng: Random, chance: float, count: int) -> Hits:
    return Hits(sum(rng.random() < chance for _ in range(count)), count)


def steps_of(*seconds: float) -> Moments:
    square = sum(value**2 for value in seconds)
    return Moments((len(seconds), sum(seconds), square, *(0.0,) * (1 + 2 * K + len(PAIRS))))


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("count", [12, 40, 300])
def test_one_rate_hardly_ever_looks_like_two(chance: float, count: int) -> None:
    rng = Random(count)
    alarms = sum(rate_changed(drafts(rng, chance, 300), drafts(rng, chance, count)) for _ in range(2000))
    assert alarms <= 4


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.01), (0.02, 0.6)])
def test_twenty_drafts_show_a_fall_and_a_rise(before: float, after: float) -> None:
    rng = Random(1)
    seen = sum(rate_changed(drafts(rng, before, 300), drafts(rng, after, 20)) for _ in range(100))
    assert seen >= 75


def test_an_easy_answer_is_no_change_where_answers_differ() -> None:
    """Sixty drafts of one answer say as much as fifteen."""
    usual, easy = Hits(225, 300), Hits(59, 60)
    assert rate_changed(usual, easy, 1)
    assert not rate_changed(usual, easy, 4)
    assert rate_changed(usual, Hits(60, 120), 2)
    assert rate_changed(usual, Hits(5, 40), 4)


def test_too_few_drafts_show_nothing() -> None:
    assert not rate_changed(Hits(300, 300), Hits(0, 7))


def test_a_cost_changes_by_more_than_noise_and_more_than_a_little() -> None:
    known = steps_of(*[0.1, 0.11, 0.09] * 8)
    assert time_changed(known, steps_of(*[0.2, 0.21] * 4))
    assert not time_changed(known, steps_of(*[0.2, 0.21] * 3)), "too few"
    assert not time_changed(known, steps_of(*[0.11] * 40)), "within a sixth it counts as noise"
    assert not time_changed(known, steps_of(*[0.02, 0.4] * 4)), "they do not agree with each other"


def test_steps_of_two_costs_give_way_to_steps_of_one() -> None:
    assert time_changed(steps_of(*[0.3] * 4, *[0.6] * 12), steps_of(*[0.301, 0.302] * 8))


def test_the_misses_of_new_drafts_keep_their_ranks() -> None:
    """All counts are made up with rank 1 for six of ten misses, so the estimate after the change has that share too."""
    cell = AcceptanceCell(task="other", depth=1, hits=900, total=1000, new_hits=20, new_total=60, ranks=(60,), at=995)
    fresh = Delta(seconds=5, draft="d", acceptance={("other", 1): Hits(7, 20, (8,))})
    (after,) = learn_delta(LearnedState(draft="d", acceptance=(cell,)), fresh, now=1000.0).acceptance
    assert after.changed_at == 1000
    assert after.ranks[0] / (after.total - after.hits) == pytest.approx(0.6, abs=0.05)
