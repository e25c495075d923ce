"""Backends that make a step repeatable: CUDA graphs, or eager execution.

The eager backend runs the same calls over the same tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], None]
"""Callable that queues a step. It reads and writes tensors at fixed addresses."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Captured work. ``replay`` queues it again; ``seconds`` is its time measured at capture, 0 if not measured."""

    replay: Work
    seconds: float = 0.0


class CaptureBackend(Protocol):
    """Backend that captures work for replay."""

    def capture(self, work: Work) -> Captured:
        """Capture ``work``, which may run several times meanwhile and must be harmless then."""
        ...

    def clear(self) -> None:
        """Release what is shared by earlier captures; none of them is replayed again."""
        ...


class EagerBackend:
    """Backend without capture: every replay runs the work again. Used in tests."""

    def capture(self, work: Work) -> Captured:
        """Return ``work`` itself, untimed."""
        return Captured(work)

    def clear(self) -> None:
        """Do nothing, since eager execution shares no state between captures."""


class CudaGraphBackend:
    """Backend that captures CUDA graphs.

    All graphs share one memory pool. This is safe because no two graphs run at once and none reads intermediate
    results of another.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Work) -> Captured:
        """Run ``work`` once, capture it in a CUDA graph and time one replay.

        The first run compiles kernels and allocates library workspaces, which is not possible during a capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: CUDA calls of a thread that loads a draft meanwhile must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        graph.replay()
        torch.cuda.synchronize()
        began = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        return Captured(graph.replay, time.monotonic() - began)

    def clear(self) -> None:
        """Start a new memory pool for the graphs to come.

        Libraries may keep memory of the old pool after its last graph is gone; such a pool accepts no new graph.
        """
        self._pool = torch.cuda.graph_pool_handle()
