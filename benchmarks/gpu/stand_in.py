"""Stand-in for a GPU: the calls of torch.cuda that stages make, on a machine without one.

`hack/gpu --dry-run` installs it in every stage. The stage then runs the same lines as on a GPU, over tensors on the
CPU. Times and memory are those of the CPU, or placeholders; none of them means anything. Decode steps of the engine run
through its graphs, whose backend repeats the step instead of replaying it.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from specdecode_worker.engine import factory
from specdecode_worker.engine.cuda_graphs import EagerBackend

SHORTEST_MILLISECONDS = 1e-3
"""Least time between two events, so that no stage divides by zero."""


class Event:
    """Stand-in of torch.cuda.Event that reads the host's clock."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: all work of a CPU is done."""

    def elapsed_time(self, later: Event) -> float:
        """Return the milliseconds until ``later``."""
        return max(1e3 * (later._seconds - self._seconds), SHORTEST_MILLISECONDS)


class Graph:
    """Stand-in of torch.cuda.CUDAGraph: the captured block ran once, and a replay does nothing."""

    def replay(self) -> None:
        """Do nothing."""


class Stream:
    """Stand-in of torch.cuda.Stream."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: a CPU has one queue."""


@contextmanager
def _block(*_: Any, **__: Any) -> Iterator[None]:
    """Stand in for the contexts of a stream and of a capture."""
    yield


def _resident_bytes(*_: Any) -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


CALLS: dict[str, Any] = {
    "CUDAGraph": Graph,
    "Event": Event,
    "Stream": Stream,
    "current_stream": Stream,
    "empty_cache": lambda: None,
    "get_device_name": lambda *_: "none (dry run)",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=0, L2_cache_size=0, multi_processor_count=2),
    "graph": _block,
    "graph_pool_handle": lambda: (0, 0),
    "max_memory_allocated": _resident_bytes,
    "mem_get_info": lambda *_: (16 * 2**30, 16 * 2**30),
    "memory_allocated": _resident_bytes,
    "reset_peak_memory_stats": lambda *_: None,
    "stream": _block,
    "synchronize": lambda *_: None,
}
"""Replacements of the attributes of torch.cuda."""


def install() -> None:
    """Replace the calls for the rest of the process."""
    for name, replacement in CALLS.items():
        setattr(torch.cuda, name, replacement)
    # The factory asks for a backend, and captures nothing on a CPU without one.
    factory.capture_backend = lambda device: EagerBackend()
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.repair()
