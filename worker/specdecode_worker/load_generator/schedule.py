"""Who comes when, and what they do: drawn once from a seed, so that two runs send the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a client does."""

    stream = "stream"
    whole = "whole"
    disconnect = "disconnect"
    """Reads a few pieces of a stream and hangs up."""
    oversized = "oversized"
    """Asks for more tokens than the model takes: a 400 is the right answer."""
    garbage = "garbage"
    """Sends no JSON: a 400 is the right answer."""

    @property
    def refused(self) -> bool:
        return self in (Kind.oversized, Kind.garbage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Arrivals rise from ``rate[0]`` to ``rate[1]`` requests a second in the middle and fall again; ``shares`` of
    clients misbehave; answers have ``max_tokens[0]`` to ``max_tokens[1]`` tokens, short ones more often."""

    seconds: float
    rate: tuple[float, float]
    max_tokens: tuple[int, int]
    shares: dict[Kind, float]
    sampled: float = 0.5
    """Share of requests at temperature 0.8 with a seed; the others are greedy."""

    def rate_at(self, second: float) -> float:
        low, high = self.rate
        return low + (high - low) * (1 - abs(2 * second / self.seconds - 1))


@dataclass(frozen=True, slots=True)
class Visit:
    """One client: when it comes, which prompt it brings, and how it goes about it."""

    number: int
    at_seconds: float
    kind: Kind
    prompt: int
    max_tokens: int
    temperature: float
    seed: int

    @property
    def key(self) -> tuple[int, int, float, int]:
        """Requests with the same key must get the same text."""
        return (self.prompt, self.max_tokens, self.temperature, self.seed)


def visits(profile: Profile, prompts: Sequence[str], seed: int) -> Iterator[Visit]:
    """Poisson arrivals over the profile's seconds. Seeds are few, so that the same question comes again."""
    dice = random.Random(seed)
    second, number = 0.0, 0
    kinds, weights = _kinds(profile.shares)
    low, high = profile.max_tokens
    while True:
        second += dice.expovariate(profile.rate_at(min(second, profile.seconds)))
        if second >= profile.seconds:
            return
        sampled = dice.random() < profile.sampled
        yield Visit(
            number=number,
            at_seconds=second,
            kind=dice.choices(kinds, weights)[0],
            prompt=dice.randrange(len(prompts)),
            max_tokens=round(low * (high / low) ** (dice.randrange(5) / 4)),
            temperature=0.8 if sampled else 0.0,
            seed=dice.randrange(2) if sampled else 0,
        )
        number += 1


def _kinds(shares: dict[Kind, float]) -> tuple[list[Kind], list[float]]:
    rest = 1 - sum(shares.values())
    if rest < 0 or min(shares.values(), default=0) < 0:
        raise ValueError(f"the shares of {', '.join(shares)} must be positive and at most 1 together")
    found = {**shares, Kind.stream: rest / 2, Kind.whole: rest / 2}
    return list(found), list(found.values())
