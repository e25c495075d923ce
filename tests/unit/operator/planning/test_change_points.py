"""A change is told from chance: rarely where there is none, surely where there is one."""

from __future__ import annotations

import random

import pytest

from specdecode_operator.decision.learn import learn_delta
from specdecode_operator.planning.estimates import rate_changed, time_changed
from specdecode_operator.state.learned import AcceptanceCell, LearnedState
from specdecode_operator.telemetry.counters import PAIRS, Delta, Hits, K, Moments


def drafts(rng: random.Random, chance: float, count: int) -> Hits:
    return Hits(sum(rng.random() < chance for _ in range(count)), count)


def steps(*seconds: float) -> Moments:
    square = sum(value**2 for value in seconds)
    return Moments((len(seconds), sum(seconds), square, *(0.0,) * (1 + 2 * K + len(PAIRS))))


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("count", [12, 40, 300])
def test_one_rate_hardly_ever_looks_like_two(chance: float, count: int) -> None:
    rng = random.Random(count)
    alarms = sum(rate_changed(drafts(rng, chance, 300), drafts(rng, chance, count)) for _ in range(2000))
    assert alarms <= 4


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.01), (0.02, 0.6)])
def test_twenty_drafts_show_a_fall_and_a_rise(before: float, after: float) -> None:
    rng = random.Random(1)
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
    known = steps(*[0.1, 0.11, 0.09] * 8)
    assert time_changed(known, steps(*[0.2, 0.21] * 4))
    assert not time_changed(known, steps(*[0.2, 0.21] * 3)), "too few"
    assert not time_changed(known, steps(*[0.11] * 40)), "within a sixth it counts as noise"
    assert not time_changed(known, steps(*[0.02, 0.4] * 4)), "they do not agree with each other"


def test_steps_of_two_costs_give_way_to_steps_of_one() -> None:
    assert time_changed(steps(*[0.3] * 4, *[0.6] * 12), steps(*[0.301, 0.302] * 8))


def test_the_misses_of_new_drafts_keep_their_ranks() -> None:
    """All counts are made up with rank 1 for six of ten misses, so the estimate after the change has that share too."""
    cell = AcceptanceCell(task="other", depth=1, hits=900, total=1000, new_hits=20, new_total=60, ranks=(60,), at=995)
    fresh = Delta(seconds=5, draft="d", acceptance={("other", 1): Hits(7, 20, (8,))})
    (after,) = learn_delta(LearnedState(draft="d", acceptance=(cell,)), fresh, now=1000.0).acceptance
    assert after.changed_at == 1000
    assert after.ranks[0] / (after.total - after.hits) == pytest.approx(0.6, abs=0.05)
