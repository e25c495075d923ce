"""Whether a draft is better than the one it came from: paired time per token, by domain and over the traffic's mix.

Pure but for its own seeded resampling. Both drafts went through the same texts, so a conversation gives a pair of step
counts, and a round of timing a pair of step costs. Conversations are resampled within their domain, rounds of timing
among themselves (Efron's bootstrap, percentiles), so that bounds hold what either leaves uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Finding = Literal["better", "worse", "inconclusive"]
EXIT_CODES: Mapping[Finding, int] = {"better": 0, "worse": 2, "inconclusive": 3}
FEWEST_CONVERSATIONS = 64
"""Of a domain; with fewer nothing is concluded."""
TOLERATED_LOSS = -0.02
"""A domain's gain may be this at least."""
_TAILS = (0.025, 0.975)
_RESAMPLES = 4000
_AT_ONCE = 250


@dataclass(frozen=True, slots=True)
class Domain:
    """Of one domain's conversations (C): tokens behind the first of each answer, and the steps either draft takes for
    them. ``weight`` is the domain's share of the traffic's tokens; a golden domain has none."""

    name: str
    weight: float
    tokens_C: Floats
    deployed_C: Floats
    candidate_C: Floats


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step with either draft, from rounds (R) in which both were timed one after the other."""

    deployed_R: Floats
    candidate_R: Floats


@dataclass(frozen=True, slots=True)
class Gain:
    """Deployed over candidate time per token, less one: 0.1 is ten percent more tokens in the same time."""

    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Verdict:
    finding: Finding
    reasons: tuple[str, ...]
    mix: Gain | None
    domains: Mapping[str, Gain]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.finding]


def judge(domains: Sequence[Domain], costs: StepCosts, *, wanted_gain: float, seed: int = 0) -> Verdict:
    """``better``: the mix's lower bound exceeds ``wanted_gain`` and no domain's is under the tolerated loss.
    ``worse``: some domain's upper bound is under it, or the mix's under zero. Bounds leave out 2.5 % on each side.
    """
    few = [f"{d.name}: {len(d.tokens_C)} conversations" for d in domains if len(d.tokens_C) < FEWEST_CONVERSATIONS]
    judged = [d for d in domains if len(d.tokens_C)]
    if not any(d.weight > 0 for d in judged):
        return Verdict("inconclusive", ("no captured conversation to judge by",), None, {})
    mix, gains = _gains(judged, costs, seed)
    if few:
        reason = f"fewer than {FEWEST_CONVERSATIONS} conversations in a domain"
        return Verdict("inconclusive", (reason, *few), mix, gains)
    finding, reasons = _finding(mix, gains, wanted_gain)
    return Verdict(finding, reasons, mix, gains)


def _finding(mix: Gain, gains: Mapping[str, Gain], wanted: float) -> tuple[Finding, tuple[str, ...]]:
    lost = [f"{name}: gain under {g.upper:+.1%}" for name, g in gains.items() if g.upper < TOLERATED_LOSS]
    lost += [f"mix: gain under {mix.upper:+.1%}"] if mix.upper < 0 else []
    if lost:
        return "worse", tuple(lost)
    doubts = [f"{name}: gain above {g.lower:+.1%} only" for name, g in gains.items() if not g.lower > TOLERATED_LOSS]
    doubts += [] if mix.lower > wanted else [f"mix: gain above {mix.lower:+.1%} only, {wanted:+.1%} is wanted"]
    return ("inconclusive", tuple(doubts)) if doubts else ("better", (f"mix: gain above {mix.lower:+.1%}",))


def _gains(domains: Sequence[Domain], costs: StepCosts, seed: int) -> tuple[Gain, dict[str, Gain]]:
    rng = np.random.default_rng(seed)
    ratio_B = _cost_ratios(costs, rng)
    steps = [_steps_per_token(domain, rng) for domain in domains]  # of each domain [2, 1 + resamples]
    gains = {d.name: _gain(ratio_B * each[0] / each[1] - 1) for d, each in zip(domains, steps, strict=True)}
    weight_D = np.array([d.weight for d in domains])
    mixed_2B = np.tensordot(weight_D, np.stack(steps), axes=1)
    return _gain(ratio_B * mixed_2B[0] / mixed_2B[1] - 1), gains


def _gain(drawn_B: Floats) -> Gain:
    """The first is of the data as they are."""
    lower, upper = np.quantile(drawn_B[1:], _TAILS)
    return Gain(float(drawn_B[0]), float(lower), float(upper))


def _cost_ratios(costs: StepCosts, rng: np.random.Generator) -> Floats:
    """[1 + resamples] deployed over candidate seconds of a step, medians of the rounds' ratios: what slows a round
    falls on both, what disturbs one of them is no cost."""
    rounds = len(costs.deployed_R)
    drawn_BR = np.vstack([np.arange(rounds), rng.integers(rounds, size=(_RESAMPLES, rounds))])
    found: Floats = np.median((costs.deployed_R / costs.candidate_R)[drawn_BR], axis=1)
    return found


def _steps_per_token(domain: Domain, rng: np.random.Generator) -> Floats:
    """[2, 1 + resamples] of deployed and candidate, in ratio of sums over the drawn conversations."""
    count = len(domain.tokens_C)
    sums_3C = np.stack([domain.deployed_C, domain.candidate_C, domain.tokens_C])
    parts = [sums_3C.sum(axis=1, keepdims=True)]
    for start in range(0, _RESAMPLES, _AT_ONCE):
        times_BC = rng.multinomial(count, np.full(count, 1 / count), size=min(_AT_ONCE, _RESAMPLES - start))
        parts.append(sums_3C @ times_BC.T)
    sums_3B = np.hstack(parts)
    found: Floats = sums_3B[:2] / sums_3B[2]
    return found
