"""Atomic writes of files: a kill or a loss of power at any moment leaves either the old file or the new one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
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


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, so that a crash undoes nothing. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
