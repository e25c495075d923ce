"""Earlier conversations that are mixed into a run, so that a draft does not forget them."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdecode_worker.training.conversations import Conversation, DataSet, answer_length, read_shard, shard_paths
from specdecode_worker.training.distillation.deletion import is_distillation_run
from specdecode_worker.training.distillation.records import read_records_of
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.recipe import VALIDATION_CONVERSATIONS, VALIDATION_PER_DOMAIN

# The replay pool: text of the parent's training, replayed so that the student does not forget it.
#
# An output folder of `train` holds ``recorded/``, one of `distill` ``data/train`` and ``data/validation``. In both
# cases, text that the parent was validated on is used for validation, and text that it was trained on is replayed.

VALIDATION_EVERY = 8
"""Number of conversations of which one is for validation, where no earlier run has divided them."""


@dataclass(slots=True)
class Pool:
    """Conversations to replay and conversations to validate on."""

    training: list[Conversation] = field(default_factory=list)
    validation: list[Conversation] = field(default_factory=list)


def read_pool(folders: Sequence[Path], *, most_tokens: int, oldest_seconds: float = 0.0) -> Pool:
    """Return about ``most_tokens`` tokens of training text, an equal part from each folder.

    Captured text from before the Unix time ``oldest_seconds`` is left out.

    Raises:
        TrainingError: A folder is not the output of `train` or `distill`.
    """
    pool = Pool()
    for folder in folders:
        most = most_tokens // len(folders)
        if shard_paths(folder / "recorded"):
            _read_recorded(folder / "recorded", pool, most)
        elif shard_paths(folder / "data" / "train"):
            pool.training += _read(folder / "data" / "train", most, oldest_seconds)
            pool.validation += _read(folder / "data" / "validation", most // 8, oldest_seconds)
        elif is_distillation_run(folder):
            continue  # all of its text has expired
        else:
            raise TrainingError(f"{folder} holds nothing to replay; name the --out of a `train` or `distill` run")
    return pool


def split_pool(conversations: Sequence[Conversation]) -> Pool:
    """Return a pool in which every eighth conversation of a domain is for validation."""
    pool = Pool()
    counts: Counter[str] = Counter()
    for conversation in conversations:
        counts[conversation.domain] += 1
        last = counts[conversation.domain] % VALIDATION_EVERY == 0
        (pool.validation if last else pool.training).append(conversation)
    return pool


def _read_recorded(folder: Path, pool: Pool, most_tokens: int) -> None:
    """Add conversations of a `train` run, divided as in that run, up to ``most_tokens`` training tokens."""
    data = DataSet(folder, validation=VALIDATION_CONVERSATIONS, per_domain=VALIDATION_PER_DOMAIN)
    shards, seen = len(shard_paths(folder)), 0
    while seen < shards and _tokens(data.training) < most_tokens:
        seen = data.grow(seen + 1)
    pool.training += data.training
    pool.validation += data.validation


def _read(folder: Path, most_tokens: int, oldest_seconds: float) -> list[Conversation]:
    """Return the conversations of the first shards that hold ``most_tokens`` tokens of text that is not expired."""
    conversations: list[Conversation] = []
    for path in shard_paths(folder):
        if _tokens(conversations) >= most_tokens:
            break
        conversations += _unexpired(path, oldest_seconds) if oldest_seconds else read_shard(path)
    return conversations


def _unexpired(shard: Path, oldest_seconds: float) -> list[Conversation]:
    pairs = zip(read_records_of(shard), read_shard(shard), strict=True)
    return [conversation for record, conversation in pairs if record.time_seconds >= oldest_seconds]


def _tokens(conversations: Sequence[Conversation]) -> int:
    return sum(len(c.tokens_N) for c in conversations)


# Composition of distillation rounds and their stopping rules, as pure functions of the validation results so far.
#
# A round mixes captured conversations with replayed ones from the parent's training text. The seed and the results of
# the rounds so far determine everything, and the checkpoint contains both, so a stopped run resumes with the same
# rounds.

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
    losses = [1 - speed / first.old[domain] for domain, speed in result.old.items() if domain in first.old]
    return max([0.0, *losses])


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
    for conversation in itertools.cycle(order):
        if total >= tokens:
            break
        chosen.append(conversation)
        total += max(answer_length(conversation), 1)
    return chosen
