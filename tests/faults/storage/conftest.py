"""Fixture of the tests of full disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tiers import skip_reason


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(skip_reason("root", f"a file system cannot be mounted here: {mounted.stderr.strip()}"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
