"""Launch times on a GPU and its copy rate.

A dry run of `hack/gpu` replaces the calls of torch.cuda, so these functions then run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS_PER_GRAPH = 40
"""Calls captured in one graph, so that the start of its replay is a small part of what is timed."""
MOST_BUFFERS = 16
_COPIED_BYTES = 2**31 if DEVICE == "cuda" else 2**20

Call = Callable[[], object]


def buffers(nbytes: int) -> int:
    """Return the number of operand sets of ``nbytes`` each to rotate over: together twice the L2 cache.

    A call then finds nothing of its own operands in the cache, as in a step whose other layers evicted them.
    """
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(max(2, -(-2 * cache // max(nbytes, 1)) + 1), MOST_BUFFERS)


def seconds(*calls: Call, repeats: int = 9) -> float:
    """Return the median seconds of a call, from replays of one CUDA graph of many calls, without host launches.

    The calls do the same work over different operands (see `buffers`) and take turns.
    """
    rounds = max(1, CALLS_PER_GRAPH // len(calls)) if DEVICE == "cuda" else 1
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times) / (rounds * len(calls))


def copy_rate() -> float:
    """Return the rate of a copy within device memory in bytes per second, counting bytes read and written."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / seconds(lambda: target.copy_(source))


def read_rate() -> float:
    """Return the rate of reading device memory in bytes per second: the sum of a large tensor."""
    source = torch.ones(_COPIED_BYTES // 4, dtype=torch.float32, device=DEVICE)
    return _COPIED_BYTES / seconds(lambda: torch.sum(source))
