"""Drift detector, its baseline, and the cost of a token in chains of three, from counts of the main path."""

from __future__ import annotations

import math
import random

import pytest

from specdecode_operator.drafts.drift import (
    DAY_SECONDS,
    LEARNING_DAYS,
    Baseline,
    ChainCounts,
    DriftDetector,
    LearningBaseline,
    batches_between_alarms,
    excess_loss,
    log_cost,
)

KNOWN = ChainCounts((8000.0, 5600.0, 3360.0), (10000.0, 8000.0, 5600.0))
"""Rates 0.8, 0.7 and 0.6."""


def cost_at(at: float) -> float:
    """Return a log cost with a daily cycle."""
    return 0.3 * math.sin(2 * math.pi * at / DAY_SECONDS)


@pytest.fixture(scope="module")
def learnt() -> Baseline:
    coins, learning = random.Random(0), LearningBaseline()
    for batch in range(LEARNING_DAYS * 96):
        at = batch * DAY_SECONDS / 96
        assert not learning.is_complete(at)
        learning = learning.add(at, cost_at(at) + coins.gauss(0, 0.05))
    assert learning.is_complete(LEARNING_DAYS * DAY_SECONDS)
    late = learning.add(LEARNING_DAYS * DAY_SECONDS, 9.9)
    assert late == learning, "a batch of an eighth day would count as a whole day"
    return learning.freeze()


def test_a_baseline_follows_the_half_hours_of_the_day(learnt: Baseline) -> None:
    for hour in (3, 6, 12, 18, 23):
        at = 20 * DAY_SECONDS + hour * 3600.0
        assert learnt.expected(at) == pytest.approx(cost_at(at), abs=0.04)
    assert learnt.deviation == pytest.approx(0.05, rel=0.2)
    assert learnt.batches_per_month == pytest.approx(30 * 96)
    assert batches_between_alarms(learnt, tasks=3) == pytest.approx(3 * 30 * 96)


def test_a_half_hour_without_batches_takes_the_others() -> None:
    baseline = LearningBaseline().add(12 * 3600.0, 0.5).freeze()
    assert baseline.expected(0.0) == pytest.approx(0.5)


def test_days_that_differ_widen_the_accepted_loss() -> None:
    baselines = []
    for spread in (0.0, 0.1):
        learning = LearningBaseline()
        for batch in range(LEARNING_DAYS * 48):
            at = batch * DAY_SECONDS / 48
            learning = learning.add(at, spread * (-1) ** (batch // 48) + 0.01 * (-1) ** batch)
        baselines.append(learning.freeze())
    same, different = baselines
    assert same.day_deviation == pytest.approx(0.0, abs=1e-9)
    assert different.day_deviation == pytest.approx(0.107, rel=0.01)
    at = 9 * DAY_SECONDS
    excess = [excess_loss(one, at, one.expected(at) + 0.15) * one.deviation for one in baselines]
    assert excess[0] - excess[1] == pytest.approx(1.5 * 0.107, rel=0.02)


def test_the_detector_is_a_shiryaev_roberts_sum() -> None:
    """Compare with the definition: the sum over starts of products of e-values."""
    coins = random.Random(4)
    values = [coins.gauss(0.2, 1) for _ in range(30)]
    detector = DriftDetector()
    for value in values:
        detector = detector.add(value)
    sums = []
    for tilt in (0.25, 0.5, 1.0):
        clipped = [min(max(value, -1.0), 1.0) for value in values]
        factors = [math.exp(tilt * value - (tilt * value) ** 2 / 2) for value in clipped]
        sums.append(sum(math.prod(factors[start:]) for start in range(len(factors))))
    assert detector.log_evidence == pytest.approx(math.log(sum(sums) / 3))


def test_false_alarms_are_no_more_frequent_than_promised() -> None:
    """A loss of exactly the accepted size is the worst case of what must not raise alarms."""
    coins, detector, alarms = random.Random(6), DriftDetector(), 0
    for _ in range(60_000):
        detector = detector.add(coins.choice((-1, 1)) * coins.expovariate(1.0))
        if detector.alarms(1000):
            alarms, detector = alarms + 1, DriftDetector()
    assert 0 < alarms <= 60


def tokens(hits: tuple[float, ...], totals: tuple[float, ...], known: ChainCounts = KNOWN) -> float:
    return math.exp(-log_cost(ChainCounts(hits, totals), known))


def test_a_chain_emits_the_products_of_its_rates() -> None:
    exact = 1 + 0.8 + 0.8 * 0.7 + 0.8 * 0.7 * 0.6
    assert tokens(KNOWN.hits, KNOWN.totals) == pytest.approx(exact)


def test_a_depth_that_was_not_drafted_follows_the_first_in_the_known_ratio() -> None:
    expected = 1 + 0.4 + 0.4 * 0.35 + 0.4 * 0.35 * 0.3
    assert tokens((400.0, 0.0, 0.0), (1000.0, 0.0, 0.0)) == pytest.approx(expected)


def test_a_depth_without_a_known_ratio_counts_nothing_of_its_own() -> None:
    """The baseline had none of it either, so that a deeper plan is not taken for another draft."""
    shallow = ChainCounts((8000.0, 0.0, 0.0), (10000.0, 0.0, 0.0))
    expected = 1 + 0.8 + 0.8**2 + 0.8**3
    assert tokens((800.0, 80.0, 0.0), (1000.0, 800.0, 80.0), shallow) == pytest.approx(expected)


def test_a_few_positions_move_little_and_many_move_all() -> None:
    usual = tokens((800.0, 560.0, 336.0), (1000.0, 800.0, 560.0))
    few = tokens((800.0, 0.0, 0.0), (1000.0, 2.0, 0.0))
    many = tokens((800.0, 0.0, 0.0), (1000.0, 800.0, 0.0))
    assert few == pytest.approx(usual, rel=0.05)
    assert many == pytest.approx(1.8, rel=0.03)


def test_extreme_rates_stay_finite() -> None:
    assert tokens((1000.0, 1000.0, 1000.0), (1000.0, 1000.0, 1000.0)) < 4
    assert tokens((0.0, 0.0, 0.0), (1000.0, 0.0, 0.0)) > 1
