"""Text of the parent's training split, so that a draft does not forget what it could: from where the parent left it.

A folder of `train` holds ``recorded/``, one of `distill` ``data/train`` and ``data/validation``; of either, what the
parent was validated on steers and what it was trained on is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdecode_worker.training.data.batches import DataSet
from specdecode_worker.training.data.shards import Conversation, read_shard, shard_paths
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.recipe import VALIDATION_CONVERSATIONS, VALIDATION_PER_DOMAIN


@dataclass(slots=True)
class Pool:
    training: list[Conversation] = field(default_factory=list)
    validation: list[Conversation] = field(default_factory=list)

    @property
    def domains(self) -> list[str]:
        return sorted({conversation.domain for conversation in self.training})


def read_pool(folders: Sequence[Path], *, most_tokens: int) -> Pool:
    """About ``most_tokens`` tokens of training text, the same part of each folder. Raises TrainingError."""
    pool = Pool()
    for folder in folders:
        most = most_tokens // len(folders)
        if shard_paths(folder / "recorded"):
            _read_recorded(folder / "recorded", pool, most)
        elif shard_paths(folder / "data" / "train"):
            pool.training += _read(folder / "data" / "train", most)
            pool.validation += _read(folder / "data" / "validation", most // 8)
        else:
            raise TrainingError(f"{folder} holds nothing to replay; name the --out of a `train` or `distill` run")
    return pool


def _read_recorded(folder: Path, pool: Pool, most_tokens: int) -> None:
    data = DataSet(folder, validation=VALIDATION_CONVERSATIONS, per_domain=VALIDATION_PER_DOMAIN)
    shards, seen = len(shard_paths(folder)), 0
    while seen < shards and _tokens(data.training) < most_tokens:
        seen = data.grow(seen + 1)
    pool.training += data.training
    pool.validation += data.validation


def _read(folder: Path, most_tokens: int) -> list[Conversation]:
    found: list[Conversation] = []
    for path in shard_paths(folder):
        if _tokens(found) >= most_tokens:
            break
        found += read_shard(path)
    return found


def _tokens(conversations: Sequence[Conversation]) -> int:
    return sum(len(c.tokens_N) for c in conversations)
