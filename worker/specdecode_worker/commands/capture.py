"""Command ``capture``: keep the retention of captured requests while no worker runs, and delete those of a user.

It also deletes runs of `distill`, which hold copies of captured requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from specdecode_worker.capture.puller import FETCHED_FOLDER
from specdecode_worker.capture.records import CaptureError, FolderUnusable, Record
from specdecode_worker.capture.segments import (
    RETENTION_FILE,
    UserHashes,
    delete_expired,
    delete_user_records,
    derived_key,
    stored_keys,
    stored_retention,
)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 on success, 1 if a folder cannot be used or may still hold records of the user."""
    codes = []
    try:
        keys = _keys(args) if args.action == "delete" else []
    except CaptureError as error:
        print(f"specdecode-worker capture: {error}", file=sys.stderr)
        return 1
    for folder in args.folders if args.action == "prune" else _with_fetched(args.folders):
        try:
            if args.action == "prune":
                codes.append(_prune(folder))
            elif _is_run(folder):
                codes.append(_delete_from_run(folder, args, keys))
            else:
                codes.append(
                    _sweep(folder, args.max_age) if args.action == "sweep" else _delete(folder, args.user, keys)
                )
        except CaptureError as error:
            print(f"specdecode-worker capture: {error}", file=sys.stderr)
            codes.append(1)
    return max(codes)


def _with_fetched(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the folders of records: a run of `distill` has fetched segments, and data once it reads them."""
    for folder in folders:
        fetched = folder / FETCHED_FOLDER
        if fetched.is_dir():
            yield fetched
        if (folder / "data").is_dir() or not fetched.is_dir():
            yield folder


def _keys(args: argparse.Namespace) -> list[bytes]:
    """Return the keys of all named folders and of the token file: copies of records have the same hashes."""
    keys = [key for folder in args.folders for key in stored_keys(folder).values()]
    if args.token_file is None:
        return keys
    try:
        return keys + [derived_key(token) for token in args.token_file.read_text().split()]
    except (OSError, UnicodeDecodeError) as error:
        raise FolderUnusable(f"{args.token_file} cannot be read: {getattr(error, 'strerror', error)}") from None


def _prune(folder: Path) -> int:
    """Delete a run and those before it, and return the exit code."""
    from specdecode_worker.training.distillation.deletion import began_seconds, delete_runs

    if began_seconds(folder) is None:
        raise FolderUnusable(f"{folder} is not named by the time of a run of `distill`")
    return 0 if delete_runs(folder, lambda line: print(line, file=sys.stderr), with_own=True) else 1


def _is_run(folder: Path) -> bool:
    """Return whether the folder is the output of `distill`, which has data of its own."""
    return (folder / "data").is_dir() and not (folder / RETENTION_FILE).exists()


def _delete_from_run(folder: Path, args: argparse.Namespace, keys: list[bytes]) -> int:
    """Delete expired records, or those of a user, from a run of `distill` and return the exit code."""
    # Imported here, because it needs torch, which the deletion of segments does not.
    from specdecode_worker.training.distillation.deletion import delete_from_run
    from specdecode_worker.training.errors import TrainingError

    if args.action == "sweep" and args.max_age is None:
        raise FolderUnusable(f"{folder} is a run of `distill`; give the maximum age of its records with --max-age")
    oldest = time.time() - args.max_age if args.action == "sweep" else 0.0
    hashes = UserHashes(args.user, keys) if args.action == "delete" else None
    undecidable = 0

    def unwanted(record: Record) -> bool:
        nonlocal undecidable
        if hashes is None:
            return record.time_seconds < oldest
        undecidable += hashes.is_undecidable(record.user)
        return hashes.matches(record.user)

    try:
        count = delete_from_run(folder, unwanted)
    except TrainingError as error:
        raise FolderUnusable(str(error)) from None
    except OSError as error:
        raise FolderUnusable(f"{error.filename or folder} cannot be rewritten: {error.strerror or error}") from None
    print(f"{folder}: {count} records deleted from the data of a distillation run")
    return _warn_of_undecidable(folder, undecidable)


def _sweep(folder: Path, max_age_seconds: float | None) -> int:
    """Delete the expired segments of a folder and return the exit code."""
    if not folder.is_dir():
        raise FolderUnusable(f"{folder} is no folder; name the one that `serve --capture` was given")
    stored = stored_retention(folder)
    if max_age_seconds is None and stored is None:
        raise FolderUnusable(f"{folder} holds no retention.json of a worker; give the maximum age with --max-age")
    age_seconds = max_age_seconds if max_age_seconds is not None else stored.max_age_seconds if stored else 0.0
    try:
        deleted = delete_expired(folder, age_seconds, time.time())
    except OSError as error:
        raise FolderUnusable(f"{error.filename or folder} cannot be deleted: {error.strerror or error}") from None
    print(f"{folder}: {deleted} expired segments deleted")
    return 0


def _delete(folder: Path, user: str, keys: list[bytes]) -> int:
    """Delete the records of a user from a folder and return the exit code."""
    counts = delete_user_records(folder, user, keys)
    print(f"{folder}: {counts.records} records deleted, {counts.segments} segments rewritten")
    code = _warn_of_undecidable(folder, counts.undecidable)
    if not counts.unreadable:
        return code
    print(
        f"specdecode-worker capture: {folder}: {counts.unreadable} segments or records cannot be read and may be of "
        "this user; they are deleted when they expire, or delete their files now",
        file=sys.stderr,
    )
    return 1


def _warn_of_undecidable(folder: Path, count: int) -> int:
    """Name the number of records whose keys are missing, and return the exit code."""
    if not count:
        return 0
    print(
        f"specdecode-worker capture: {folder}: {count} records have hashes of an unknown key and may be of this user; "
        "name the folder of the worker that wrote them too, or give its operator tokens with --token-file",
        file=sys.stderr,
    )
    return 1
