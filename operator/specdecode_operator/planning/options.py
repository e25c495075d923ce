"""Depths weighed against each other at one load: time per token, and how sure one is of a gain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from specdecode_operator.planning.acceptance import Chance, expected_tokens, gradient
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.steptime import Seconds, StepTimes, ordered


@dataclass(frozen=True, slots=True)
class Option:
    """One depth at one load."""

    depth: int
    seconds: Seconds
    tokens: float
    """Expected tokens of a step."""

    @property
    def per_token(self) -> float:
        """Seconds per token of one sequence."""
        return self.seconds.mean / self.tokens

    def __str__(self) -> str:
        timed = "" if self.seconds.steps else " (extrapolated)"
        name = f"chain:{self.depth}" if self.depth else "plain"
        return f"{name} {self.seconds.mean * 1000:.1f} ms{timed} for {self.tokens:.2f} tokens"


@dataclass(frozen=True, slots=True)
class Options:
    """All depths that may run at one load, by depth."""

    by_depth: dict[int, Option]
    chances: list[Chance]

    def gain(self, before: int, after: int) -> float:
        """Expected relative fall of the time per token: 0.1 is a tenth more tokens in the same time."""
        return self.by_depth[before].per_token / self.by_depth[after].per_token - 1

    def confidence(self, before: int, after: int, least: float) -> float:
        """P(gain > least), the logarithm of the gain taken as normal."""
        one, two = self.by_depth[before], self.by_depth[after]
        spread = math.sqrt(_relative(one.seconds) + _relative(two.seconds) + self._tokens_variance(before, after))
        distance = math.log(1 + self.gain(before, after)) - math.log(1 + least)
        return NormalDist().cdf(distance / spread) if spread > 0 else float(distance > 0)

    def _tokens_variance(self, before: int, after: int) -> float:
        """Of log tokens(after) - log tokens(before): depths share their first chances, so their errors do not add."""
        slopes = zip(gradient(self.chances, after), gradient(self.chances, before), self.chances, strict=True)
        return sum((two - one) ** 2 * chance.variance for two, one, chance in slopes)


def weigh(times: StepTimes, chances: list[Chance], load: Load, context_bucket: int, depths: set[int]) -> Options:
    """``chances`` reach to the deepest of ``depths``."""
    rising = sorted(depths)
    seconds = ordered([times.predict(load, depth, context_bucket) for depth in rising])
    options = [
        Option(depth, found, expected_tokens(chances[:depth])) for depth, found in zip(rising, seconds, strict=True)
    ]
    return Options({option.depth: option for option in options}, chances)


def _relative(seconds: Seconds) -> float:
    return seconds.variance / seconds.mean**2
