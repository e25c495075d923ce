"""Atomic writes of small files: a kill at any moment leaves either the old file or the new one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Write ``document`` as JSON to ``path``, atomically."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` through a temporary file and one rename."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` through a temporary file and one rename."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.rename(partial, path)
