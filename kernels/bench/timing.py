"""Times of launches on a GPU, and the rate that they are held against. Without a GPU (a dry run) a clock will do."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_BYTES = 2**31 if DEVICE == "cuda" else 2**24


def seconds(run: Callable[[], object], *, repeats: int = 30) -> float:
    """Median seconds of a run inside a graph, without the host's launches. The L2 cache is swept before each."""
    if DEVICE == "cpu":
        return _by_the_clock(run)
    sweep = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        sweep.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def _by_the_clock(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def copy_rate() -> float:
    """Bytes a second of a copy within the device's memory, read and written counted."""
    source = torch.empty(_BYTES, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * _BYTES / seconds(lambda: target.copy_(source), repeats=10)
