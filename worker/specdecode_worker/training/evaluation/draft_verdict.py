"""Statistical comparison of two drafts: paired time per token, by domain and over the traffic's mix.

All functions are pure except for seeded resampling. Both drafts were evaluated on the same texts, so a conversation
gives a pair of step counts and a round of timing gives a pair of step times. Conversations are resampled within their
domain and rounds of timing among themselves (Efron's percentile bootstrap), so the bounds include the uncertainty of
both.

Shape suffixes: C conversations, R rounds of timing, B the data followed by the resamples, D domains.
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
MIN_CONVERSATIONS = 64
"""Fewest conversations of a domain; with fewer the verdict is inconclusive."""
TOLERATED_LOSS = -0.02
"""Lowest gain that a single domain may have."""
_TAILS = (0.025, 0.975)
_RESAMPLES = 4000
_AT_ONCE = 250


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """Token and step counts of one domain by conversation (C).

    ``tokens_C`` counts the tokens after the first of each answer; ``deployed_C`` and ``candidate_C`` the steps that
    either draft takes for them. ``weight`` is the domain's share of the traffic's tokens, 0 for a golden domain.
    """

    name: str
    weight: float
    tokens_C: Floats
    deployed_C: Floats
    candidate_C: Floats


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds per step with either draft, from rounds (R) that time both in turn."""

    deployed_R: Floats
    candidate_R: Floats


@dataclass(frozen=True, slots=True)
class Gain:
    """Deployed over candidate time per token, minus one, with bounds: 0.1 is 10 % more tokens in the same time."""

    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison with its reasons and gains. ``mix`` is the gain over the traffic's mix."""

    finding: Finding
    reasons: tuple[str, ...]
    mix: Gain | None
    domains: Mapping[str, Gain]

    @property
    def exit_code(self) -> int:
        """Exit code of the command for this finding."""
        return EXIT_CODES[self.finding]


def compute_verdict(domains: Sequence[Domain], costs: StepCosts, *, wanted_gain: float, seed: int = 0) -> Verdict:
    """Compare the drafts and return the verdict.

    ``better``: the lower bound of the mix exceeds ``wanted_gain``, and the lower bound of every domain exceeds
    ``TOLERATED_LOSS``. ``worse``: the upper bound of a domain is below ``TOLERATED_LOSS``, or that of the mix is below
    zero. The bounds leave out 2.5 % on each side.
    """
    few = [f"{d.name}: {len(d.tokens_C)} conversations" for d in domains if len(d.tokens_C) < MIN_CONVERSATIONS]
    judged = [d for d in domains if len(d.tokens_C)]
    if not any(d.weight > 0 for d in judged):
        return Verdict("inconclusive", ("no captured conversation to judge by",), None, {})
    mix, gains = _gains(judged, costs, seed)
    if few:
        reason = f"fewer than {MIN_CONVERSATIONS} conversations in a domain"
        return Verdict("inconclusive", (reason, *few), mix, gains)
    finding, reasons = _finding(mix, gains, wanted_gain)
    return Verdict(finding, reasons, mix, gains)


def _finding(mix: Gain, gains: Mapping[str, Gain], wanted: float) -> tuple[Finding, tuple[str, ...]]:
    """Return the finding for these gains and the reasons for it."""
    lost = [f"{name}: gain under {g.upper:+.1%}" for name, g in gains.items() if g.upper < TOLERATED_LOSS]
    lost += [f"mix: gain under {mix.upper:+.1%}"] if mix.upper < 0 else []
    if lost:
        return "worse", tuple(lost)
    doubts = [f"{name}: gain above {g.lower:+.1%} only" for name, g in gains.items() if not g.lower > TOLERATED_LOSS]
    doubts += [] if mix.lower > wanted else [f"mix: gain above {mix.lower:+.1%} only, {wanted:+.1%} is wanted"]
    return ("inconclusive", tuple(doubts)) if doubts else ("better", (f"mix: gain above {mix.lower:+.1%}",))


def _gains(domains: Sequence[Domain], costs: StepCosts, seed: int) -> tuple[Gain, dict[str, Gain]]:
    """Return the gain over the mix and the gain of each domain."""
    rng = np.random.default_rng(seed)
    ratio_B = _cost_ratios(costs, rng)
    steps = [_steps_per_token(domain, rng) for domain in domains]  # each [2, 1 + resamples]
    gains = {d.name: _gain(ratio_B * each[0] / each[1] - 1) for d, each in zip(domains, steps, strict=True)}
    weight_D = np.array([d.weight for d in domains])
    mixed_2B = np.tensordot(weight_D, np.stack(steps), axes=1)
    return _gain(ratio_B * mixed_2B[0] / mixed_2B[1] - 1), gains


def _gain(drawn_B: Floats) -> Gain:
    """Return the gain and its bounds. The first entry of ``drawn_B`` is the estimate, the others are resamples."""
    lower, upper = np.quantile(drawn_B[1:], _TAILS)
    return Gain(float(drawn_B[0]), float(lower), float(upper))


def _cost_ratios(costs: StepCosts, rng: np.random.Generator) -> Floats:
    """Return deployed over candidate seconds per step, [1 + resamples].

    Each is the median of the rounds' ratios: a disturbance of a whole round cancels in its ratio, and one of a single
    measurement does not move the median.
    """
    rounds = len(costs.deployed_R)
    drawn_BR = np.vstack([np.arange(rounds), rng.integers(rounds, size=(_RESAMPLES, rounds))])
    ratios: Floats = np.median((costs.deployed_R / costs.candidate_R)[drawn_BR], axis=1)
    return ratios


def _steps_per_token(domain: Domain, rng: np.random.Generator) -> Floats:
    """Return the steps per token of both drafts, [2, 1 + resamples], as ratios of sums over the drawn conversations."""
    count = len(domain.tokens_C)
    sums_3C = np.stack([domain.deployed_C, domain.candidate_C, domain.tokens_C])
    parts = [sums_3C.sum(axis=1, keepdims=True)]
    for start in range(0, _RESAMPLES, _AT_ONCE):
        times_BC = rng.multinomial(count, np.full(count, 1 / count), size=min(_AT_ONCE, _RESAMPLES - start))
        parts.append(sums_3C @ times_BC.T)
    sums_3B = np.hstack(parts)
    ratios: Floats = sums_3B[:2] / sums_3B[2]
    return ratios
