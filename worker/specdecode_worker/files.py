"""Atomic writes: a kill or a loss of power at any moment leaves the old file or folder, or the new one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and move what was written there to ``path`` by one rename."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    flush(partial)
    os.replace(partial, path)


def write_json(path: Path, document: Any, indent: int = 1) -> None:
    """Write ``document`` as JSON to ``path``, atomically."""
    write_bytes(path, (json.dumps(document, indent=indent) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, atomically."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def filled(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``, which the first of all processes fills, through a partial folder and one rename."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                fill(partial)
                for path in partial.iterdir():
                    if path.is_file() and not path.is_symlink():
                        flush(path)
                partial.rename(folder)
    return folder


@contextlib.contextmanager
def locked(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file ``path``. ``waits`` is called first if another process holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, so that a crash undoes nothing. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
