"""Processes of this machine, by what /proc says of them, and ports that none has."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def children(pid: int) -> dict[int, str]:
    """Return the command lines of the children of a process, by their ids."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in thread.read_text().split():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def spawned(pid: int) -> list[int]:
    """Return the children that multiprocessing spawned, without its resource tracker."""
    return [child for child, words in children(pid).items() if "spawn_main" in words]


def of_pod(uid: str, program: str) -> list[int]:
    """Return the processes of a program in a pod of this machine's node, by the pod's cgroup. None is a failure."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            is_in_pod = uid in (folder / "cgroup").read_text().replace("_", "-")
            if is_in_pod and program.encode() in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
    assert pids, f"no process {program} of pod {uid} is visible on this machine"
    return pids


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or is a zombie that its parent has not collected yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, which depends less on other processes of the machine than its wall time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return the numbers of free ports of an address, each of them once."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((address, 0))
        return [one.getsockname()[1] for one in sockets]
