"""The replay pool: text of the parent's training, replayed so that the student does not forget it.

An output folder of `train` holds ``recorded/``, one of `distill` ``data/train`` and ``data/validation``. In both cases,
text that the parent was validated on is used for validation, and text that it was trained on is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdecode_worker.training.data.batches import DataSet
from specdecode_worker.training.data.shards import Conversation, read_shard, shard_paths
from specdecode_worker.training.distillation.run_deletion import is_distillation_run
from specdecode_worker.training.distillation.sample_shards import read_records_of
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.recipe import VALIDATION_CONVERSATIONS, VALIDATION_PER_DOMAIN

VALIDATION_EVERY = 8
"""Number of conversations of which one is for validation, where no earlier run has divided them."""


@dataclass(slots=True)
class Pool:
    """Conversations to replay and conversations to validate on."""

    training: list[Conversation] = field(default_factory=list)
    validation: list[Conversation] = field(default_factory=list)

    @property
    def domains(self) -> list[str]:
        """Domains of the training conversations, sorted."""
        return sorted({conversation.domain for conversation in self.training})


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


def merge_pools(one: Pool, other: Pool) -> Pool:
    """Return a pool with the conversations of both."""
    return Pool(one.training + other.training, one.validation + other.validation)


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
