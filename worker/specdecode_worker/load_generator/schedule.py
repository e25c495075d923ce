"""Request schedule of a load run, drawn from a seed so that two runs send the same requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ClientBehaviour(StrEnum):
    """Behaviour of a client."""

    stream = "stream"
    whole = "whole"
    disconnect = "disconnect"
    """Reads a few pieces of a stream and disconnects."""
    oversized = "oversized"
    """Requests more tokens than the context length; the expected response is 400."""
    garbage = "garbage"
    """Sends invalid JSON; the expected response is 400."""

    @property
    def refused(self) -> bool:
        """True for requests that the server must refuse with 400."""
        return self in (ClientBehaviour.oversized, ClientBehaviour.garbage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Load profile of a run.

    The arrival rate rises from ``rate[0]`` to ``rate[1]`` requests per second in the middle of the run and falls again.
    ``shares`` has the fractions of misbehaving clients. ``max_tokens`` is drawn from ``max_tokens[0]`` to
    ``max_tokens[1]``, uniformly on a logarithmic scale.
    """

    seconds: float
    rate: tuple[float, float]
    max_tokens: tuple[int, int]
    shares: dict[ClientBehaviour, float]
    sampled: float = 0.5
    """Fraction of requests at temperature 0.8 with a seed; the others are greedy."""

    def rate_at(self, second: float) -> float:
        """Return the arrival rate, in requests per second, at ``second`` of the run."""
        low, high = self.rate
        return low + (high - low) * (1 - abs(2 * second / self.seconds - 1))


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Scheduled request: its time, the index of its prompt, its parameters and the behaviour of its client."""

    number: int
    at_seconds: float
    kind: ClientBehaviour
    prompt: int
    max_tokens: int
    temperature: float
    seed: int

    @property
    def key(self) -> tuple[int, int, float, int]:
        """Identity of the request; requests with the same key must get the same text."""
        return (self.prompt, self.max_tokens, self.temperature, self.seed)


def schedule_requests(profile: Profile, prompts: Sequence[str], seed: int) -> Iterator[ScheduledRequest]:
    """Yield requests with Poisson arrivals over the duration of the profile.

    Only two seeds and five lengths are drawn, so that equal requests repeat and their texts can be compared.
    """
    rng = random.Random(seed)
    second, number = 0.0, 0
    kinds, weights = _kinds(profile.shares)
    low, high = profile.max_tokens
    while True:
        second += rng.expovariate(profile.rate_at(min(second, profile.seconds)))
        if second >= profile.seconds:
            return
        sampled = rng.random() < profile.sampled
        yield ScheduledRequest(
            number=number,
            at_seconds=second,
            kind=rng.choices(kinds, weights)[0],
            prompt=rng.randrange(len(prompts)),
            max_tokens=round(low * (high / low) ** (rng.randrange(5) / 4)),
            temperature=0.8 if sampled else 0.0,
            seed=rng.randrange(2) if sampled else 0,
        )
        number += 1


def _kinds(shares: dict[ClientBehaviour, float]) -> tuple[list[ClientBehaviour], list[float]]:
    """Return all kinds and their fractions. Streaming and complete responses share the remainder equally.

    Raises:
        ValueError: A fraction is negative, or their sum exceeds 1.
    """
    rest = 1 - sum(shares.values())
    if rest < 0 or min(shares.values(), default=0) < 0:
        raise ValueError(f"the shares of {', '.join(shares)} must be positive and at most 1 together")
    all_shares = {**shares, ClientBehaviour.stream: rest / 2, ClientBehaviour.whole: rest / 2}
    return list(all_shares), list(all_shares.values())
