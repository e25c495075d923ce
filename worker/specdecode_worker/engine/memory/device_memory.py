"""Memory limits and free memory of the GPU, the container or the machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from specdecode_worker.engine.memory.memory_budget import Device
from specdecode_worker.models.errors import ModelError

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def device_memory(device: torch.device, count: int = 1) -> Device:
    """Return the memory of ``device``; with ``count`` GPUs, the smallest limit and free memory among them.

    Raises:
        ModelError: There are fewer than ``count`` GPUs.
    """
    return _cuda(count) if device.type == "cuda" else _cpu(count)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that the running process can still allocate, unused memory of torch's allocator included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    _, free = _machine()
    limit, used = _container_limit(), _container_usage()
    return free if limit is None or used is None else min(free, limit - used)


def _cuda(count: int) -> Device:
    available = torch.cuda.device_count()
    if available < count:
        raise ModelError(f"tensor_parallel_size is {count}, but torch sees {available} GPUs here; lower it or add GPUs")
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    free, limit = min(free for free, _ in memory), min(total for _, total in memory)
    return Device(kind="cuda", limit=limit, free=free, source="GPU memory", count=count)


def _cpu(count: int) -> Device:
    """Return the memory of the machine or the container, divided by the ranks that share it.

    The page cache counts as free.
    """
    machine, free = _machine()
    limit = _container_limit()
    if limit is None or limit >= machine:
        return Device(kind="cpu", limit=machine // count, free=free // count, source="machine's memory", count=count)
    free = min(limit, free)
    return Device(kind="cpu", limit=limit // count, free=free // count, source="container's memory limit", count=count)


def _machine() -> tuple[int, int]:
    """Return the machine's total and available memory in bytes."""
    try:
        meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return tuple(int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total


def _container_usage() -> int | None:
    """Return the memory that the container uses in bytes, without inactive page cache; None outside of a cgroup."""
    for folder, usage in ((CGROUP, "memory.current"), (CGROUP / "memory", "memory.usage_in_bytes")):
        try:
            words = (folder / "memory.stat").read_text().split()
            stat = dict(zip(words[::2], words[1::2], strict=True))
            idle = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            return int((folder / usage).read_text()) - int(idle)
        except (OSError, ValueError):
            continue
    return None


def _container_limit() -> int | None:
    """Return the container's memory limit in bytes from cgroup v2 or v1; None if there is none."""
    for path in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        try:
            return int(path.read_text())
        except (OSError, ValueError):  # cgroup v2 writes "max" for no limit.
            continue
    return None
