"""What a step is captured with: a CUDA graph, or nothing at all, which runs the same calls over the same tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], None]
"""Queues a step; it reads and writes tensors that stay where they are, and returns nothing."""


@dataclass(frozen=True, slots=True)
class Captured:
    """``replay`` queues the work again. ``seconds`` is what it took when it was captured, 0 where nobody measured."""

    replay: Work
    seconds: float = 0.0


class Runner(Protocol):
    """Makes work repeatable."""

    def capture(self, work: Work) -> Captured:
        """``work`` may be run some times while it is captured, so it must do no harm then."""
        ...

    def forget(self) -> None:
        """All that was captured is gone."""
        ...


class EagerRunner:
    """Runs work again each time: the path of graphs where there are none to be had, and in tests."""

    def capture(self, work: Work) -> Captured:
        return Captured(work)

    def forget(self) -> None:
        """Nothing is kept here."""


class CudaRunner:
    """All graphs share one pool of memory: no two run at once, and what one leaves there nobody reads."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Work) -> Captured:
        """The first run compiles kernels and makes the workspaces of libraries, which a capture must not."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may load a draft meanwhile: what they do is no part of this, and must not break it.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        graph.replay()
        torch.cuda.synchronize()
        began = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        return Captured(graph.replay, time.monotonic() - began)

    def forget(self) -> None:
        """What libraries keep of the pool may outlive its last graph, and such a pool takes no other."""
        self._pool = torch.cuda.graph_pool_handle()
