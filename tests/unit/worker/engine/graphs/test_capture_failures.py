"""A step that cannot be captured runs without a graph; the others keep theirs."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.core.errors import RankLost
from specdecode_worker.engine.cuda_graphs import Captured, CaptureFailed, CudaGraphBackend, EagerBackend, Work
from specdecode_worker.engine.engine import Engine
from support.small_llama import engine_of, networks, plan_of, submit, texts


class FailingBackend(EagerBackend):
    """Backend whose captures number ``failing`` (from 0) fail."""

    def __init__(self, *failing: int) -> None:
        self._failing, self.captures = failing, 0

    def capture(self, work: Work) -> Captured:
        self.captures += 1
        if self.captures - 1 in self._failing:
            raise CaptureFailed("out of memory")
        return super().capture(work)


def engine(*failing: int) -> tuple[Engine, FailingBackend]:
    backend = FailingBackend(*failing)
    made = engine_of(networks(torch.float64), backend=backend, rows=(1, 2, 4))
    made.set_plan(plan_of("chain:2"))
    return made, backend


def test_only_the_steps_of_a_failed_capture_run_without_a_graph() -> None:
    asked = [submit(index, sampled=True, tokens=12 + 4 * index) for index in range(4)]
    whole, _ = engine()
    wanted = texts(whole, asked)
    made, backend = engine(0)  # the largest graph is captured first
    assert whole._graphs is not None
    assert len(made._graphs) == len(whole._graphs) - 1
    captures = backend.captures
    assert texts(made, asked) == wanted
    assert made._graphs.eager["failed"] > 3
    assert made._graphs.replayed > 3
    assert backend.captures == captures, "a failed capture is not tried again at every step"
    made.set_plan(plan_of("chain:2"))
    assert backend.captures == captures


def test_an_engine_serves_without_any_graph() -> None:
    asked = [submit(index, sampled=False, tokens=8) for index in range(2)]
    whole, _ = engine()
    made, _ = engine(*range(100))
    assert len(made._graphs) == 0
    assert texts(made, asked) == texts(whole, asked)
    assert made._graphs.replayed == 0


class OutOfResources(Exception):
    """Error of Triton for a kernel that needs more shared memory than a GPU has. It is no RuntimeError."""


class BrokenOff(CudaGraphBackend):
    """Backend whose runs before a capture end with an error. It needs no GPU."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def warm_up(self, work: Work) -> None:
        raise self._error

    def clear(self) -> None:
        pass


def test_a_kernel_that_does_not_fit_the_device_leaves_its_steps_without_a_graph() -> None:
    asked = [submit(index, sampled=False, tokens=8) for index in range(2)]
    whole, _ = engine()
    made = engine_of(networks(torch.float64), backend=BrokenOff(OutOfResources("shared memory")), rows=(1, 2, 4))
    made.set_plan(plan_of("chain:2"))
    assert texts(made, asked) == texts(whole, asked)
    assert made._graphs.eager["failed"] > 0


def test_the_loss_of_a_rank_is_no_failed_capture() -> None:
    """Its signal may arrive during a capture, and is sent once."""
    with pytest.raises(RankLost):
        BrokenOff(RankLost("rank 1: ended")).capture(lambda: None)
