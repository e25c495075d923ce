"""Batches of recorded conversations: validation texts apart, the rest shuffled, of one length a batch.

The order is a function of (seed, epoch) alone, so that a run that goes on after a kill sees what it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdecode_worker.training.shards import Conversation, read_shard, shard_paths

# Batches are cut from pools of this many, sorted by length: little padding, still well mixed.
_POOL_BATCHES = 16


_VALIDATION_EVERY = 8


class DataSet:
    """The conversations of the shards in a folder. ``grow`` takes in those that a rollout has added since.

    Every eighth greedy conversation is kept apart, until there are ``validation``; everything else is for training.
    """

    def __init__(self, folder: Path, *, validation: int) -> None:
        self.folder = folder
        self.training: list[Conversation] = []
        self.validation: list[Conversation] = []
        self._validation_size = validation
        self._shards = 0
        self._greedy = 0

    def grow(self, limit: int | None = None) -> int:
        """Reads new shards, up to ``limit`` in all; returns how many are in use."""
        for path in shard_paths(self.folder)[self._shards : limit]:
            self._shards += 1
            for conversation in read_shard(path):
                (self.validation if self._apart(conversation) else self.training).append(conversation)
        return self._shards

    def _apart(self, conversation: Conversation) -> bool:
        self._greedy += conversation.temperature == 0
        wanted = len(self.validation) < self._validation_size and self._greedy % _VALIDATION_EVERY == 1
        return wanted and conversation.temperature == 0


def answer_length(conversation: Conversation) -> int:
    return len(conversation.tokens_N) - conversation.answer_start


def batches(conversations: Sequence[Conversation], *, tokens: int, seed: int, epoch: int) -> list[list[Conversation]]:
    """One epoch, each batch of about ``tokens`` answer tokens with its padding."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(conversations)
    rng.shuffle(order)
    per_pool = max(1, _POOL_BATCHES * tokens // max(1, _mean_length(order)))
    found = [
        batch
        for start in range(0, len(order), per_pool)
        for batch in _cut(sorted(order[start : start + per_pool], key=answer_length), tokens)
    ]
    rng.shuffle(found)
    return found


def _mean_length(conversations: Sequence[Conversation]) -> int:
    return sum(answer_length(c) for c in conversations) // max(1, len(conversations))


def _cut(by_length: Sequence[Conversation], tokens: int) -> Iterator[list[Conversation]]:
    batch: list[Conversation] = []
    for conversation in by_length:
        # The newest is the longest, so it is what all rows of the batch would be padded to.
        if batch and (len(batch) + 1) * answer_length(conversation) > tokens:
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch
