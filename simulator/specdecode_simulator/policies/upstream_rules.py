"""Decisions of vLLM 0.33.0 and SGLang 0.5.23, written after their source.

`benchmarks/upstream_rules.py` compares them with the files of the wheels on random inputs:
vllm/v1/worker/gpu/spec_decode/{adaptive_verification,acceptance_estimator}.py and
sglang/srt/speculative/adaptive_spec_params.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = Any

# --- SGLang: speculative steps by batch size --------------------------------------------------------------------------


class StepCandidates(NamedTuple):
    """Numbers of draft passes of one batch size, and the hysteresis between them."""

    steps: tuple[int, ...]
    up: float = 0.0
    down: float = 0.0
    ceiling: float = 0.0


SGLANG_DEFAULT: Mapping[int, StepCandidates] = {
    1: StepCandidates((1, 3, 5, 7), down=-0.25),
    8: StepCandidates((0, 1, 3)),
    32: StepCandidates((0, 1)),
    64: StepCandidates((0,)),
}
"""SGLang's table: a batch uses the entry of the largest batch size that is not above its own."""


@dataclass(slots=True)
class StepSlot:
    """Draft passes of one batch size: they follow a moving average of the accepted tokens."""

    candidates: StepCandidates
    initial: int = 3
    alpha: float = 0.2
    interval: int = 5
    warmup: int = 10
    steps: int = field(init=False)
    average: float = field(init=False)
    _batches: int = 0

    def __post_init__(self) -> None:
        steps = self.candidates.steps
        self.steps = self.initial if self.initial in steps else steps[len(steps) // 2]
        self.average = float(self.steps - 1)

    def update(self, accepted: float) -> None:
        """Add a verified batch with the mean of its accepted draft tokens."""
        if self.steps > 0:
            self.average = (1 - self.alpha) * self.average + self.alpha * accepted
        self._batches += 1
        if self._batches > self.warmup and (self._batches - self.warmup) % self.interval == 0:
            self._move()

    def _move(self) -> None:
        steps, at = self.candidates.steps, self.candidates.steps.index(self.steps)
        if self.steps == 0:
            # Without drafts nothing is accepted: the least number of passes is tried.
            self.steps = steps[min(at + 1, len(steps) - 1)]
            if self.steps > 0 and self.average < 0:
                self.average = float(self.steps - 1)
            return
        before = at
        while at > 0 and self.average <= (steps[at - 1] - 0.5 if steps[at - 1] else 0.5) + self.candidates.down:
            at -= 1
        if at == before:
            while at + 1 < len(steps) and self.average > steps[at] - 0.5 + self.candidates.up:
                at += 1
        if self.candidates.ceiling > 0 and at <= before:
            most = max(1, math.ceil(self.average * self.candidates.ceiling))
            while at > 0 and steps[at] > most:
                at -= 1
        self.steps = steps[at]


def slot_of(batch_sizes: Sequence[int], sequences: int) -> int:
    """Return the batch size whose slot a batch uses; ``batch_sizes`` ascend."""
    return max([size for size in batch_sizes if size <= sequences], default=batch_sizes[0])


# --- vLLM: adaptive verification --------------------------------------------------------------------------------------


def draft_budget(
    survival: Array, sequences: int, other_tokens: int, draft_cost: float, verify_costs: Array, most: int
) -> int:
    """Return how many draft tokens of a batch are verified: those of most tokens in the same time.

    Args:
        survival: Probability that each draft token of the batch is accepted, in any order.
        sequences: Requests that emit a token whatever is accepted.
        other_tokens: Tokens that are verified besides drafts.
        draft_cost: Time of drafting for this batch.
        verify_costs: Time of a target pass by its tokens.
        most: Largest budget.
    """
    best_first = np.sort(survival)[::-1][:most]
    tokens = sequences + np.concatenate(([0.0], np.cumsum(best_first)))
    costs = draft_cost + verify_costs[other_tokens : other_tokens + len(best_first) + 1]
    return int(np.argmax(tokens / costs))


def admitted_drafts(confidences: Array, drafts: Array, budget: int) -> Array:
    """[requests] how many draft tokens of each are verified: the likeliest ``budget`` of all.

    Args:
        confidences: [requests, depth] probability that a token is accepted if its parents are.
        drafts: [requests] drafted tokens.
        budget: Draft tokens that are verified, at most those that were drafted.
    """
    survival = np.cumprod(confidences, axis=1)
    survival[np.arange(survival.shape[1]) >= drafts[:, None]] = -np.inf
    winners = np.argsort(-survival, axis=None, kind="stable")[:budget]
    return np.bincount(winners // survival.shape[1], minlength=len(drafts))


@dataclass(slots=True)
class AcceptanceEstimator:
    """Acceptance by the log-odds of the draft's likeliest token: one slope, and an intercept for each depth.

    Newton's method on the drafts of the last `interval` steps, damped where there are few.
    """

    depth: int
    interval: int = 100
    damping: float = 50.0
    ridge: float = 1e-3
    slope: float = 0.5
    intercepts: Array = field(init=False)
    _weights: Array = field(init=False)
    """[depth, 3] sums of w f^2, w f and w."""
    _residuals: Array = field(init=False)
    """[depth, 2] sums of r f and r."""
    _counts: Array = field(init=False)

    def __post_init__(self) -> None:
        self.intercepts = np.full(self.depth, -0.2)
        self._clear()

    def predict(self, features: Array) -> Array:
        """[..., depth] acceptance probabilities."""
        return 1 / (1 + np.exp(-(self.slope * features + self.intercepts)))

    def add(self, features: Array, predictions: Array, accepted: Array, admitted: Array, times: float = 1.0) -> None:
        """Count verified drafts ``times`` times: accepted tokens and the first rejected one of each request."""
        depths = np.arange(self.depth)
        seen = (depths <= accepted[:, None]) & (depths < admitted[:, None])
        weight = np.where(seen, predictions * (1 - predictions), 0.0)
        residual = np.where(seen, (depths < accepted[:, None]) - predictions, 0.0)
        sums = [weight * features**2, weight * features, weight]
        self._weights += times * np.stack([each.sum(axis=0) for each in sums], axis=1)
        self._residuals += times * np.stack([(residual * features).sum(axis=0), residual.sum(axis=0)], axis=1)
        self._counts += times * seen.sum(axis=0)

    def refit(self) -> None:
        """Move slope and intercepts by one damped step, and discard the samples."""
        square, cross, own = self._weights.T
        own, total = own + self.ridge, square.sum() + self.ridge
        by_slope, by_depth = self._residuals.T
        step = (by_slope.sum() - (cross * by_depth / own).sum()) / (total - (cross**2 / own).sum())
        step *= self._counts.sum() / (self._counts.sum() + self.damping)
        step = step if self.slope + step >= 0 else 0.0
        self.slope += step
        self.intercepts = self.intercepts + (by_depth - cross * step) / own * self._counts / (
            self._counts + self.damping
        )
        self._clear()

    def _clear(self) -> None:
        self._weights, self._residuals = np.zeros((self.depth, 3)), np.zeros((self.depth, 2))
        self._counts = np.zeros(self.depth)
