"""Evidence against "the centre of a symmetric distribution is at most zero", valid at every look.

For X symmetric around zero, E[exp(l X - l^2 X^2 / 2)] <= 1 for every l, without a moment condition (de la Pena, "A
general class of exponential inequalities for martingales and ratios", Annals of Probability 27, 1999; Howard, Ramdas,
McAuliffe and Sekhon, "Time-uniform Chernoff bounds via nonnegative supermartingales", Probability Surveys 17, 2020).
For l > 0 the same holds for a centre below zero: exp(x - x^2 / 2) increases up to x = 1, and of two values around a
lower centre the negative one is further from zero. Products over observations are supermartingales, and so is a
mixture over l. By Ville's inequality a mixture reaches 1 / alpha with probability alpha at most, however often it is
looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TILTS = (0.25, 0.5, 1.0)
"""Values of l, for observations in units of their standard deviation. The best one is mean / (variance + mean^2).
Doubling their number would cost 0.7 in log evidence.
"""
CLIP = 1.0
"""Largest size of an observation in units of its scale. Symmetry survives the clip. A low one makes the test robust: a
stall of a few seconds in one block then weighs no more than an ordinary difference.
"""


def increments(value: float) -> tuple[float, ...]:
    """Return the log increment of each tilt for one observation in units of its scale."""
    clipped = min(max(value, -CLIP), CLIP)
    return tuple(tilt * clipped - (tilt * clipped) ** 2 / 2 for tilt in TILTS)


def log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of numbers given by their logarithms."""
    largest = max(logs)
    return largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))
