"""Training and validation sets of recorded conversations, and batches of similar length in shuffled order.

The order is a function of (seed, epoch) alone, so a resumed run sees the same batches as an uninterrupted one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdecode_worker.training.data.shards import Conversation, read_shard, shard_paths

# Batches are cut from pools of this many batches, sorted by length: little padding, still well mixed.
_POOL_BATCHES = 16


_VALIDATION_EVERY = 8


class DataSet:
    """Conversations of the shards in a folder, divided into training and validation. ``grow`` adds new shards.

    Every eighth greedy conversation of a domain is for validation, until there are ``validation`` in all or
    ``per_domain`` of the domain. All others are for training, except those with the same prompt as a validation
    conversation.
    """

    def __init__(self, folder: Path, *, validation: int, per_domain: int | None = None) -> None:
        self.folder = folder
        self.training: list[Conversation] = []
        self.validation: list[Conversation] = []
        self._validation_size, self._per_domain = validation, per_domain or validation
        self._shards = 0
        self._greedy: Counter[str] = Counter()
        self._validation_counts: Counter[str] = Counter()
        self._asked: set[tuple[int, ...]] = set()

    def grow(self, limit: int | None = None) -> int:
        """Read new shards, up to ``limit`` in all, and return the number of shards in use."""
        for path in shard_paths(self.folder)[self._shards : limit]:
            self._shards += 1
            for conversation in read_shard(path):
                (self.validation if self._apart(conversation) else self.training).append(conversation)
        self.training = [c for c in self.training if _asked(c) not in self._asked]
        return self._shards

    def _apart(self, conversation: Conversation) -> bool:
        """Return whether the conversation is for validation."""
        domain = conversation.domain
        if conversation.temperature > 0 or len(self.validation) >= self._validation_size:
            return False
        self._greedy[domain] += 1
        if self._greedy[domain] % _VALIDATION_EVERY != 1 or self._validation_counts[domain] >= self._per_domain:
            return False
        self._validation_counts[domain] += 1
        self._asked.add(_asked(conversation))
        return True


def _asked(conversation: Conversation) -> tuple[int, ...]:
    """Return the tokens of the prompt."""
    return tuple(conversation.tokens_N[: conversation.answer_start].tolist())


def answer_length(conversation: Conversation) -> int:
    """Return the number of answer tokens."""
    return len(conversation.tokens_N) - conversation.answer_start


def batches(conversations: Sequence[Conversation], *, tokens: int, seed: int, epoch: int) -> list[list[Conversation]]:
    """Return the batches of one epoch, each of about ``tokens`` answer tokens including padding."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(conversations)
    rng.shuffle(order)
    per_pool = max(1, _POOL_BATCHES * tokens // max(1, _mean_length(order)))
    epoch_batches = [
        batch
        for start in range(0, len(order), per_pool)
        for batch in _cut(sorted(order[start : start + per_pool], key=answer_length), tokens)
    ]
    rng.shuffle(epoch_batches)
    return epoch_batches


def _mean_length(conversations: Sequence[Conversation]) -> int:
    return sum(answer_length(c) for c in conversations) // max(1, len(conversations))


def _cut(by_length: Sequence[Conversation], tokens: int) -> Iterator[list[Conversation]]:
    """Yield batches of conversations in the order of their length."""
    batch: list[Conversation] = []
    for conversation in by_length:
        # The newest conversation is the longest, so all rows of the batch would be padded to its length.
        if batch and (len(batch) + 1) * answer_length(conversation) > tokens:
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch
