"""Command ``capture``: keep the retention of captured requests while no worker runs, and delete those of a user."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from specdecode_worker.capture.errors import CaptureError, FolderUnusable
from specdecode_worker.capture.retention import delete_expired, stored_retention
from specdecode_worker.capture.user_deletion import delete_user_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands ``sweep`` and ``delete`` to ``parser``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="sweep|delete")
    sweep = commands.add_parser("sweep", help="delete the segments whose records exceed their maximum age")
    sweep.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of `serve --capture`")
    sweep.add_argument("--max-age", type=float, metavar="S", help="seconds (default: that of the last worker)")
    delete = commands.add_parser(
        "delete",
        help="delete the records of one user; workers may run",
        epilog="Requests that are still running are recorded afterwards: run it when the user's requests have ended. "
        "Data that `distill` made of the records, and backups, are not changed.",
    )
    delete.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of `serve --capture`")
    delete.add_argument("--user", required=True, metavar="ID", help="value of the field `user` of the requests")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 on success, 1 if a folder cannot be used or may still hold records of the user."""
    codes = []
    for folder in args.folders:
        try:
            codes.append(_sweep(folder, args.max_age) if args.action == "sweep" else _delete(folder, args.user))
        except CaptureError as error:
            print(f"specdecode-worker capture: {error}", file=sys.stderr)
            codes.append(1)
    return max(codes)


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


def _delete(folder: Path, user: str) -> int:
    """Delete the records of a user from a folder and return the exit code."""
    counts = delete_user_records(folder, user)
    print(f"{folder}: {counts.records} records deleted, {counts.segments} segments rewritten")
    if not counts.unreadable:
        return 0
    print(
        f"specdecode-worker capture: {folder}: {counts.unreadable} segments or records cannot be read and may be of "
        "this user; they are deleted when they expire, or delete their files now",
        file=sys.stderr,
    )
    return 1
