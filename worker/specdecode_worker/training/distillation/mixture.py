"""Composition of distillation rounds and their stopping rules, as pure functions of the validation results so far.

A round mixes captured conversations with replayed ones from the parent's training text. The seed and the results of the
rounds so far determine everything, and the checkpoint contains both, so a stopped run resumes with the same rounds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdecode_worker.training.data.batches import answer_length
from specdecode_worker.training.data.shards import Conversation

MAX_OLD_LOSS = 0.01
"""Relative loss of tokens per step against the deployed draft from which an old domain counts as degraded.

The share of replay then grows.
"""
REPLAY_STEP, MOST_REPLAY = 0.1, 0.8
LEAST_PROGRESS = 0.001
"""Relative gain over the best earlier round below which a round counts as no progress."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Validation after a round: tokens per step by domain, for captured and old domains. The first is before any round.

    ``old_mean`` is over all old texts together: a single domain may have few texts, and its tokens per step are then
    noisy.
    """

    step: int
    captured: Mapping[str, float]
    old: Mapping[str, float]
    old_mean: float = 1.0


def tokens_per_step_over_mix(result: RoundResult, weights: Mapping[str, float]) -> float:
    """Return the tokens per step over the traffic's mix, or 1 if nothing was captured.

    The weights are shares of tokens, so the steps per token of the domains add up and the mean is harmonic.
    """
    steps = sum(weights.get(domain, 0.0) / tokens_per_step for domain, tokens_per_step in result.captured.items())
    total = sum(weights.get(domain, 0.0) for domain in result.captured)
    return total / steps if steps else 1.0


def worst_old_loss(result: RoundResult, first: RoundResult) -> float:
    """Return the largest relative loss of an old domain against the deployed draft, 0 if none lost."""
    return max(
        [
            0.0,
            *(
                1 - tokens_per_step / first.old[domain]
                for domain, tokens_per_step in result.old.items()
                if domain in first.old
            ),
        ]
    )


def replay_share(results: Sequence[RoundResult], start: float) -> float:
    """Return the share of replayed tokens in the next round.

    It grows by ``REPLAY_STEP`` after each round that left an old domain degraded. A ``start`` of 0 disables replay.
    """
    degraded_rounds = sum(worst_old_loss(result, results[0]) > MAX_OLD_LOSS for result in results[1:])
    return min(max(MOST_REPLAY, start), start + REPLAY_STEP * degraded_rounds) if start else 0.0


def best_of(results: Sequence[RoundResult], weights: Mapping[str, float]) -> int:
    """Return the index of the validation whose draft is the candidate.

    It is the one with the most tokens per step on the mix among those where the mean over old texts has not degraded.
    Single domains are judged by the final verdict, which has enough texts for that.
    """
    sound = [i for i, result in enumerate(results) if result.old_mean >= results[0].old_mean * (1 - MAX_OLD_LOSS)]
    # The first line is the deployed draft's own, so the list is never empty.
    return max(sound, key=lambda i: (tokens_per_step_over_mix(results[i], weights), -i))


def has_stalled(results: Sequence[RoundResult], weights: Mapping[str, float], patience: int) -> bool:
    """Return whether the last ``patience`` rounds brought no progress on the mix."""
    if len(results) <= patience:
        return False
    before = max(tokens_per_step_over_mix(result, weights) for result in results[:-patience])
    return max(tokens_per_step_over_mix(result, weights) for result in results[-patience:]) < before * (
        1 + LEAST_PROGRESS
    )


@dataclass(frozen=True, slots=True)
class Weighted:
    """Captured conversation and its weight: the number of conversations of the traffic that it represents."""

    conversation: Conversation
    weight: float


def compose(
    captured: Sequence[Weighted], replay: Sequence[Conversation], *, share: float, tokens: int, seed: int, number: int
) -> list[Conversation]:
    """Return the conversations of round ``number``, about ``tokens`` answer tokens.

    ``share`` of the tokens are replayed, with an equal part for each replayed domain.
    """
    rng = random.Random(f"{seed}/{number}")
    share = share if replay else 0.0
    # Weighted random order without replacement (Efraimidis and Spirakis 2006).
    order = sorted(captured, key=lambda one: rng.random() ** (1 / one.weight), reverse=True)
    chosen = _up_to([one.conversation for one in order], tokens * (1 - share))
    by_domain: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in replay:
        by_domain[conversation.domain].append(conversation)
    for _, conversations in sorted(by_domain.items()):
        rng.shuffle(conversations)
        chosen += _up_to(conversations, tokens * share / len(by_domain))
    rng.shuffle(chosen)
    return chosen


def _up_to(order: Sequence[Conversation], tokens: float) -> list[Conversation]:
    """Return the first conversations of ``order`` that hold ``tokens`` answer tokens.

    The order repeats as often as needed.
    """
    chosen: list[Conversation] = []
    total = 0
    while order and total < tokens:
        for conversation in order:
            if total >= tokens:
                break
            chosen.append(conversation)
            total += max(answer_length(conversation), 1)
    return chosen
