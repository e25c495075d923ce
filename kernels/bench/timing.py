"""Launch times on a GPU and its copy rate. Without a GPU (a dry run) the wall clock is used."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_BYTES = 2**31 if DEVICE == "cuda" else 2**24


def seconds(run: Callable[[], object], *, repeats: int = 30) -> float:
    """Return the median seconds of a run inside a CUDA graph, without host launches. The L2 cache is flushed first."""
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
    """Return the rate of a copy within device memory in bytes per second, counting bytes read and written."""
    source = torch.empty(_BYTES, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * _BYTES / seconds(lambda: target.copy_(source), repeats=10)
