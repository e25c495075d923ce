"""Deletion of records from the data that a distillation run made of them, by age or by user.

The run's data are copies of captured text, so the retention of the capture holds for them too. A run that is still
replaying records starts that stage again. Weights and counts of a run are not changed: they hold no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from specdecode_worker.capture import Record
from specdecode_worker.capture.segments import stored_retention
from specdecode_worker.training.conversations import normalisers_path, read_shard, shard_paths, write_shard
from specdecode_worker.training.distillation.records import Split, read_records_of
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.files import write_bytes

Unwanted = Callable[[Record], bool]


def is_distillation_run(folder: Path) -> bool:
    """Return whether ``folder`` is the ``--out`` of a `distill` run."""
    return any((folder / "data" / name).exists() for name in ("summary.json", "selected.json"))


def expiry_seconds(captures: Iterable[Path], now: float) -> float:
    """Return the Unix time before which captured text has expired: by the workers of these folders, the strictest."""
    retentions = [retention for folder in captures if (retention := stored_retention(folder)) is not None]
    return now - min(retention.max_age_seconds for retention in retentions) if retentions else 0.0


def delete_expired_from_runs(runs: Iterable[Path], oldest_seconds: float, log: Callable[[str], None]) -> None:
    """Delete the records from before ``oldest_seconds`` from those of the folders that are runs of `distill`.

    A run that cannot be written is named. Its expired text is not read (`read_pool`).
    """
    for run in filter(is_distillation_run, runs if oldest_seconds > 0 else ()):
        try:
            count = delete_from_run(run, lambda record: record.time_seconds < oldest_seconds)
        except OSError as error:
            log(f"distill: expired records of {run} cannot be deleted: {error}")
            continue
        if count:
            log(f"distill: {count} expired records deleted from {run}")


def delete_from_run(folder: Path, unwanted: Unwanted) -> int:
    """Delete the records for which ``unwanted`` holds from the run in ``folder``, and return their number.

    No process may use the run meanwhile.

    Raises:
        TrainingError: ``folder`` is not the output of `distill`.
        OSError: A file cannot be read or replaced.
    """
    if not is_distillation_run(folder):
        raise TrainingError(f"{folder} is no run of `distill`; name its --out")
    data = folder / "data"
    count = _delete_selected(data, unwanted)
    for split in get_args(Split):
        for shard in shard_paths(data / split):
            count += _delete_from_shard(shard, unwanted)
    return count


def _delete_selected(data: Path, unwanted: Unwanted) -> int:
    """Delete from the list of selected records, which exists until all of them are replayed."""
    path = data / "selected.records"
    if not path.exists():
        return 0
    records = msgspec.msgpack.decode(path.read_bytes(), type=list[Record])
    wanted = [record for record in records if not unwanted(record)]
    if len(wanted) == len(records):
        return 0
    # Chunks are numbered in the order of the list, so those that are done do not fit the shorter list.
    for done in data.glob("done-*.json"):
        done.unlink()
    for split in get_args(Split):
        for shard in shard_paths(data / split):
            _unlink_shard(shard)
    _write(path, wanted)
    return len(records) - len(wanted)


def _delete_from_shard(shard: Path, unwanted: Unwanted) -> int:
    """Delete from a shard and its records. A pair that an interrupted deletion left unequal is deleted."""
    records = read_records_of(shard)
    conversations = list(read_shard(shard))
    if len(records) != len(conversations):
        _unlink_shard(shard)
        return len(records)
    pairs = [pair for pair in zip(records, conversations, strict=True) if not unwanted(pair[0])]
    if len(pairs) == len(records):
        return 0
    normalisers_path(shard).unlink(missing_ok=True)
    if pairs:
        write_shard(shard.parent, int(shard.stem.removeprefix("shard-")), [conversation for _, conversation in pairs])
        _write(shard.with_suffix(".records"), [record for record, _ in pairs])
    else:
        _unlink_shard(shard)
    return len(records) - len(pairs)


def _unlink_shard(shard: Path) -> None:
    shard.unlink()
    shard.with_suffix(".records").unlink(missing_ok=True)
    normalisers_path(shard).unlink(missing_ok=True)


def _write(path: Path, records: Sequence[Record]) -> None:
    write_bytes(path, msgspec.msgpack.encode(list(records)))
