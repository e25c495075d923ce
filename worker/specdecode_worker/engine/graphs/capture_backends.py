"""Backends that make a step repeatable: CUDA graphs, or eager execution.

The eager backend runs the same calls over the same tensors.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], None]
"""Callable that queues a step. It reads and writes tensors at fixed addresses."""


def _nothing() -> None:
    """Do nothing: a captured step is gone with the last reference to it."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Captured work.

    ``replay`` queues it again, and ``release`` frees what other processes hold of it. ``seconds`` is its time measured
    at capture, 0 if not measured.
    """

    replay: Work
    seconds: float = 0.0
    release: Work = _nothing


class CaptureFailed(Exception):
    """A step cannot be captured; other steps can be, and steps captured before can be replayed."""


class RankCaptureFailed(CaptureFailed):
    """A step cannot be captured on one of several ranks; no rank may capture or replay any step from now on.

    The message gives the rank and its reason.
    """


class CaptureBackend(Protocol):
    """Backend that captures work for replay."""

    def capture(self, work: Work) -> Captured:
        """Capture ``work``, which may run several times meanwhile and must be harmless then.

        Raises:
            CaptureFailed: The work cannot be captured.
        """
        ...

    def clear(self) -> None:
        """Release what is shared by earlier captures; none of them is replayed again."""
        ...


class StagedBackend(CaptureBackend, Protocol):
    """Backend whose capture can be run stage by stage, so that several ranks can agree between the stages."""

    def warm_up(self, work: Work) -> None:
        """Run ``work`` once, as a capture needs it: this compiles kernels and allocates library workspaces."""
        ...

    def record(self, work: Work) -> Work:
        """Capture ``work``, which `warm_up` ran before, and return its replay. The capture itself runs nothing."""
        ...

    def timed(self, replay: Work) -> Captured:
        """Replay twice, and return the captured work with the time of the second replay."""
        ...


class EagerBackend:
    """Backend without capture: every replay runs the work again. Used in tests."""

    def capture(self, work: Work) -> Captured:
        """Return ``work`` itself, untimed."""
        return Captured(work)

    def warm_up(self, work: Work) -> None:
        """Run ``work`` once."""
        work()

    def record(self, work: Work) -> Work:
        """Return ``work`` itself."""
        return work

    def timed(self, replay: Work) -> Captured:
        """Replay once, and return the replay, untimed."""
        replay()
        return Captured(replay)

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

        Raises:
            CaptureFailed: The device lacks memory for it, or the work calls what a capture forbids.
        """
        try:
            self.warm_up(work)
            replay = self.record(work)
        except RuntimeError as error:  # torch's errors of memory and of CUDA are kinds of it
            self._forget()
            raise CaptureFailed(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        return self.timed(replay)

    def _forget(self) -> None:
        """Undo what a capture that was broken off leaves behind in torch, and take another pool for the next ones.

        torch ends neither the pool's allocations nor the generator's capture if CUDA refuses the captured graph.
        """
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, self._pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        self.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def warm_up(self, work: Work) -> None:
        """Run ``work`` once on the stream of captures and wait for it.

        This compiles kernels and allocates library workspaces, which is not possible during a capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize()

    def record(self, work: Work) -> Work:
        """Capture ``work`` in a CUDA graph and return its replay."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: CUDA calls of a thread that loads a draft meanwhile, or of NCCL's watchdog, which queries events
        # of earlier collectives (https://github.com/pytorch/pytorch/pull/104555), must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def timed(self, replay: Work) -> Captured:
        """Replay twice, and return the replay with the time of the second."""
        replay()
        torch.cuda.synchronize()
        began = time.monotonic()
        replay()
        torch.cuda.synchronize()
        return Captured(replay, time.monotonic() - began)

    def clear(self) -> None:
        """Start a new memory pool for the graphs to come.

        Libraries may keep memory of the old pool after its last graph is gone; such a pool accepts no new graph.
        """
        self._pool = torch.cuda.graph_pool_handle()


def capture_backend(device: torch.device) -> StagedBackend | None:
    """Return the backend that captures the steps of ``device``, None if its steps cannot be captured."""
    return CudaGraphBackend() if device.type == "cuda" else None
