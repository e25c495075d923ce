"""Shards of samples: conversations with the target's states, each with a file of the records they were made from."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from specdecode_worker.capture import Record
from specdecode_worker.training.data.shards import SHARD_TOKENS, read_shard, shard_paths, write_shard
from specdecode_worker.training.evaluation.paired_steps import Sample


def write_samples(folder: Path, samples: Iterable[Sample], shard_tokens: int = SHARD_TOKENS) -> None:
    """Write samples to the shards of a new ``folder`` as they come. A killed write leaves no ``folder``."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    waiting: list[Sample] = []
    number = 0
    for sample in samples:
        waiting.append(sample)
        if sum(len(one.record.tokens) for one in waiting) >= shard_tokens:
            write_sample_shard(partial, number, waiting)
            waiting, number = [], number + 1
    if waiting:
        write_sample_shard(partial, number, waiting)
    shutil.rmtree(folder, ignore_errors=True)  # an empty folder of an earlier version
    partial.rename(folder)


def write_sample_shard(folder: Path, number: int, samples: Sequence[Sample]) -> None:
    """Write a shard, then the records that it was made from."""
    path = write_shard(folder, number, [sample.conversation for sample in samples])
    path.with_suffix(".records").write_bytes(msgspec.msgpack.encode([sample.record for sample in samples]))


def read_records_of(shard: Path) -> list[Record]:
    """Return the records that a shard was made from, in the shard's order."""
    return msgspec.msgpack.decode(shard.with_suffix(".records").read_bytes(), type=list[Record])


def read_samples(folder: Path) -> Iterator[Sample]:
    """Yield the samples of the split in ``folder``."""
    for path in shard_paths(folder):
        records = read_records_of(path)
        yield from (Sample(record, c) for record, c in zip(records, read_shard(path), strict=True))
