"""Deletion of records from the data that a distillation run made of them, by age or by user.

The run's data are copies of captured text, so the retention of the capture holds for them too. A run that is still
replaying records starts that stage again. Weights and counts of a run are not changed: they hold no text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec

from specdecode_worker.capture import Record
from specdecode_worker.capture.puller import FETCHED_FOLDER
from specdecode_worker.capture.segments import delete_expired, stored_retention
from specdecode_worker.files import write_bytes
from specdecode_worker.training.conversations import read_shard, shard_paths, write_shard
from specdecode_worker.training.distillation.records import Split, delete_replayed_selection, read_records_of
from specdecode_worker.training.errors import TrainingError

Unwanted = Callable[[Record], bool]


def is_distillation_run(folder: Path) -> bool:
    """Return whether ``folder`` is the ``--out`` of a `distill` run that has begun to store the records it selected."""
    data = folder / "data"
    return (data / "summary.json").exists() or any(data.glob("selected.*"))


def expiry_seconds(captures: Iterable[Path], now: float) -> float:
    """Return the Unix time before which captured text has expired: by the workers of these folders, the strictest."""
    retentions = [retention for folder in captures if (retention := stored_retention(folder)) is not None]
    return now - min(retention.max_age_seconds for retention in retentions) if retentions else 0.0


def delete_expired_from_runs(runs: Iterable[Path], oldest_seconds: float, log: Callable[[str], None]) -> None:
    """Delete the records from before ``oldest_seconds`` from those of the folders that are runs of `distill`.

    Fetched segments that begin before it are deleted as a whole, as by a worker.
    A run that cannot be written is named. Its expired text is not read (`read_pool`).
    """
    for run in filter(is_distillation_run, runs if oldest_seconds > 0 else ()):
        try:
            delete_expired(run / FETCHED_FOLDER, 0.0, oldest_seconds)
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
    _delete_unfinished(data)
    count = _delete_selected(data, unwanted)
    for split in get_args(Split):
        for shard in shard_paths(data / split):
            count += _delete_from_shard(shard, unwanted)
    return count


def _delete_unfinished(data: Path) -> None:
    """Delete the text that a kill left half written or half deleted: no list of records and no shard has it."""
    delete_replayed_selection(data)
    for folder in (data, *(data / split for split in get_args(Split))):
        for path in folder.glob("*.partial"):
            path.unlink()
        shards = {shard.stem: shard for shard in shard_paths(folder)}
        records = {path.stem: path for path in folder.glob("shard-*.records")}
        for name in shards.keys() - records.keys():
            _unlink_shard(shards[name])
        for name in records.keys() - shards.keys():
            records[name].unlink()


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
    if pairs:
        write_shard(shard.parent, int(shard.stem.removeprefix("shard-")), [conversation for _, conversation in pairs])
        _write(shard.with_suffix(".records"), [record for record, _ in pairs])
    else:
        _unlink_shard(shard)
    return len(records) - len(pairs)


def _unlink_shard(shard: Path) -> None:
    shard.unlink()
    shard.with_suffix(".records").unlink(missing_ok=True)


def _write(path: Path, records: Sequence[Record]) -> None:
    write_bytes(path, msgspec.msgpack.encode(list(records)))


# Deletion of what a deployment no longer needs: its earlier runs, and published drafts.
#
#     .../NAME/RUN/     --out of a run; RUN is the time of its beginning, in seconds of the epoch and hexadecimal digits
#     .../NAME/HASH/    published draft, with a lineage.json that names HASH
#
# Nothing else is deleted: no other names, no links, no files that `distill` does not make. A deletion that was
# interrupted is completed by the next one, because a folder keeps its form until it is gone. Text goes before weights.

Log = Callable[[str], None]

TEXT_FOLDERS = frozenset({"captured", "data", "golden", "golden.partial", "replay", "replay.partial"})
"""Folders of a run with captured text, and with text that the target generated; a stop may leave a partial one."""
RUN_FOLDERS = TEXT_FOLDERS | {"best", "head"}
RUN_FILES = frozenset(
    name + ending
    for name in ("checkpoint.pt", "clock.json", "golden.sha256", "replay.sha256", "target.json", "verdict.json")
    for ending in ("", ".partial")
)
"""Everything that a run makes in its folder, finished or interrupted."""
_RUN = re.compile(r"[0-9a-f]{8,12}")
_DRAFT = re.compile(r"[0-9a-f]{16}")
_PRUNED = ".pruned"
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\..+")
"""Name of a hidden folder that a publication, or a deletion, left when it was interrupted."""


def began_seconds(run: Path) -> int | None:
    """Return the Unix time that the name of a run's folder says; None if it is not the name of a run."""
    return int(run.name, 16) if _RUN.fullmatch(run.name) else None


def delete_runs(own: Path, log: Log, *, with_own: bool = False) -> bool:
    """Delete the runs next to ``own`` that began before it, and ``own`` too if that is wanted.

    Later runs stay, so that a process whose Job is gone deletes nothing of the run after it.

    Returns:
        True if nothing is left; False if the file system refused a deletion, which the log names.
    """
    own_seconds, complete = began_seconds(own), True
    for folder in _folders_in(own.parent, log):
        seconds = began_seconds(folder)
        if own_seconds is None or seconds is None or seconds > own_seconds or (seconds == own_seconds and not with_own):
            continue
        complete = _completed(partial(_delete_run, folder, log), folder, log) and complete
    return complete


def delete_drafts(published: Path, keep: Set[str], before_seconds: float, log: Log) -> bool:
    """Delete the drafts in ``published`` that are older than ``before_seconds`` and whose hash is not in ``keep``.

    A draft disappears by one rename, so no worker loads a part of it. Returns as `delete_runs`.
    """
    complete = True
    for folder in _folders_in(published, log):  # hidden folders come first
        if _PARTIAL.fullmatch(folder.name):
            is_due = folder.name.endswith(_PRUNED) or _is_older(folder, before_seconds)
        else:
            is_wanted = folder.name in keep or not _DRAFT.fullmatch(folder.name)
            is_due = not is_wanted and _is_older(folder, before_seconds) and _is_published(folder)
        if is_due:
            complete = _completed(partial(_delete_draft, folder, log), folder, log) and complete
    return complete


def delete_text(run: Path, log: Log) -> None:
    """Delete the captured text of a run, what was made of it, and generated text. No run can go on from there."""
    for name in sorted(TEXT_FOLDERS):
        folder = run / name
        if folder.is_dir() and not folder.is_symlink():
            _completed(partial(_remove, folder), folder, log)


def _folders_in(parent: Path, log: Log) -> Iterator[Path]:
    """Yield the folders in ``parent`` by name. Links are none, and neither is what lies behind a linked parent."""
    if parent.is_symlink() or parent.parent.is_symlink():
        log(f"distill: nothing in {parent} is deleted, because it is a link")
        return
    try:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            log(f"distill: {parent} cannot be read, and nothing there is deleted: {error}")
        return
    yield from (parent / name for name in names)


def _delete_run(folder: Path, log: Log) -> None:
    """Delete what a run made in ``folder``, and the folder if nothing else is in it."""
    others = []
    with os.scandir(folder) as entries:
        in_order = sorted(entries, key=lambda entry: (entry.name not in TEXT_FOLDERS, entry.name))
    for entry in in_order:
        if entry.name in RUN_FOLDERS and entry.is_dir(follow_symlinks=False):
            _remove(Path(entry.path))
        elif entry.name in RUN_FILES and entry.is_file(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)
        else:
            others.append(entry.name)
    if others:
        log(f"distill: {folder} stays, because `distill` did not make {', '.join(others[:5])}")
        return
    folder.rmdir()
    log(f"distill: deleted the earlier run {folder}")


def _delete_draft(folder: Path, log: Log) -> None:
    if not folder.name.startswith("."):
        hidden = folder.with_name(f".{folder.name}{_PRUNED}")
        folder.rename(hidden)
        log(f"distill: deleted the draft {folder}, which is no longer needed")
        folder = hidden
    _remove(folder)


def _is_published(folder: Path) -> bool:
    """Return whether `distill` published this folder: files of a head alone, and a lineage of the folder's name."""
    try:
        with os.scandir(folder) as entries:
            are_files = all(
                entry.is_file(follow_symlinks=False) and entry.name.endswith((".json", ".safetensors"))
                for entry in entries
            )
        lineage = json.loads((folder / "lineage.json").read_bytes())
    except (OSError, ValueError):
        return False
    return are_files and isinstance(lineage, dict) and lineage.get("draft") == folder.name


def _is_older(folder: Path, seconds: float) -> bool:
    try:
        return folder.lstat().st_mtime < seconds
    except OSError:
        return False


def _completed(deletion: Callable[[], None], folder: Path, log: Log) -> bool:
    """Run a deletion and return whether it was completed. One that another process completed first is complete."""
    try:
        deletion()
    except FileNotFoundError:
        return True
    except OSError as error:
        log(f"distill: {folder} cannot be deleted: {error}")
        return False
    return True


def _remove(folder: Path) -> None:
    """Delete a folder. Links in it are removed and not followed. Files that another process removes are no error."""

    def refuse(function: object, path: str, info: tuple[type, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    shutil.rmtree(folder, onerror=refuse)
