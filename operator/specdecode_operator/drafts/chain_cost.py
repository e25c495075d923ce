"""Cost of a token in steps of a chain of three, from the acceptance counts of the main path.

A count at depth d says how often the target took the draft's token there, given that it took those before. The product
of the rates is therefore the same whatever shape was planned, and whether a draft was verified or scored in the shadow.
A depth that the plan seldom reaches follows the first one, in the ratio that was known while the baseline was learnt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CHAIN = 3
"""Draft tokens of the chain. It is short enough to be measured at most loads, and long enough to show a stale draft."""
LEAST_POSITIONS = 100.0
"""Positions at depth 1 that a batch needs, and positions at a deeper depth from which its ratio to the first counts."""
CARRIED_POSITIONS = 20.0
"""Weight of the known ratio against a batch's own counts, in positions. With some hundred positions a batch shows its
own rate; a plan of depth 1 leaves the known ratio alone."""
EPSILON = 0.001
"""Distance of every rate from 0 and 1."""

_NONE = (0.0,) * CHAIN


@dataclass(frozen=True, slots=True)
class ChainCounts:
    """Accepted and all tokens at depths 1 to CHAIN of the main path."""

    hits: tuple[float, ...] = _NONE
    totals: tuple[float, ...] = _NONE

    def plus(self, other: ChainCounts) -> ChainCounts:
        """Return the sums of both."""
        return ChainCounts(
            tuple(one + two for one, two in zip(self.hits, other.hits, strict=True)),
            tuple(one + two for one, two in zip(self.totals, other.totals, strict=True)),
        )

    @property
    def is_enough(self) -> bool:
        """True if a batch can be made of these counts."""
        return self.totals[0] >= LEAST_POSITIONS


def log_cost(counts: ChainCounts, known: ChainCounts) -> float:
    """Return the logarithm of the steps per token of a chain of three.

    Args:
        counts: Counts of one batch, with at least one position at depth 1.
        known: Counts from which the ratios of the deeper rates to the first one follow.
    """
    first = _rate(counts.hits[0], counts.totals[0])
    tokens, survival = 1 + first, first
    for depth in range(1, CHAIN):
        survival *= _deeper(counts, known, first, depth)
        tokens += survival
    return -math.log(tokens)


def _deeper(counts: ChainCounts, known: ChainCounts, first: float, depth: int) -> float:
    """Return the rate at an index above 0. Without a known ratio it is that of the first token, whatever was counted.

    Otherwise a plan that reaches a depth for the first time would look like another draft.
    """
    if min(known.totals[depth], known.totals[0]) < LEAST_POSITIONS:
        return first
    ratio = _rate(known.hits[depth], known.totals[depth]) / _rate(known.hits[0], known.totals[0])
    carried = CARRIED_POSITIONS * min(1.0, first * ratio)
    return _rate(counts.hits[depth] + carried, counts.totals[depth] + CARRIED_POSITIONS)


def _rate(hits: float, total: float) -> float:
    return min(1 - EPSILON, max(EPSILON, hits / total))
