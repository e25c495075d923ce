"""Cost of a token in chains of three, from counts of the main path."""

from __future__ import annotations

import math

import pytest

from specdecode_operator.drafts.drift import ChainCounts, log_cost

KNOWN = ChainCounts((8000.0, 5600.0, 3360.0), (10000.0, 8000.0, 5600.0))
"""Rates 0.8, 0.7 and 0.6."""


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
