"""Processes of this machine, by what /proc says of them."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> dict[int, str]:
    """Return the command lines of the children of a process, by their ids."""
    pids = [int(pid) for thread in Path(f"/proc/{pid}/task").glob("*/children") for pid in thread.read_text().split()]
    return {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}


def spawned(pid: int) -> list[int]:
    """Return the children that multiprocessing spawned, without its resource tracker."""
    return [child for child, words in children(pid).items() if "spawn_main" in words]


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or is a zombie that its parent has not collected yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
