"""Ranks with captured steps on a CPU, and functions that processes of tests run, which must be able to import them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from specdecode_worker.drafts.own_device_process import DraftServer, TensorRegion, TensorShape
from specdecode_worker.engine import tensor_parallel as rank_process
from specdecode_worker.engine.cuda_graphs import EagerBackend, Work
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.tensor_parallel import CaptureState, RankReady
from support.worker.small_engine import drain, plan_of, submit, texts

PROMPTS = [tuple((7 * i + 3 * j) % 97 for j in range(3 + 9 * i)) for i in range(8)]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
}
VERSIONS = itertools.count(1)


def serve(
    engine: Engine,
    shape: str,
    requests: range = range(len(PROMPTS)),
    *,
    every: int = 0,
    between: Callable[[], None] | None = None,
    **sampling: Any,
) -> dict[str, list[int]]:
    """Set a plan with one shape, run the requests and return their tokens.

    One request more arrives every ``every`` steps, so that prompt chunks run beside decoding rows; 0 adds all at once.
    ``between`` is called after half of the requests have arrived.
    """
    set_plan(engine, shape)
    outputs = []
    for index in requests:
        engine.add(submit(str(index), PROMPTS[index], seed=index, **sampling))
        outputs += [new for _ in range(every) for new in engine.step()]
        if between is not None and index == requests[len(requests) // 2]:
            between()
    return texts([*outputs, *drain(engine)])


def set_plan(engine: Engine, shape: str) -> None:
    engine.set_plan(plan_of(shape, draft=engine.report().draft.hash, version=next(VERSIONS)))


def accepted_siblings(engine: Engine) -> int:
    """Return the number of first tokens that were not the draft's likeliest one but its second or third.

    Every rank moves keys for each of them.
    """
    return sum(sum(cell.ranks[1:3]) for cell in engine.report().acceptance if cell.depth == 1)


class FailingBackend(EagerBackend):
    """Backend that captures two steps and then fails."""

    def __init__(self) -> None:
        self._left = 2

    def record(self, work: Work) -> Work:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        return super().record(work)


class ShortBackend(EagerBackend):
    """Backend whose device has no memory for a step."""

    def warm_up(self, work: Work) -> None:
        raise RuntimeError("out of memory")


def serve_with(backend: type[EagerBackend], assignment: bytes, pipe: Connection) -> None:
    """Run the process of a rank that captures steps with this backend."""
    rank_process.capture_backend = lambda device: backend()  # type: ignore[attr-defined]
    rank_process.serve_rank(assignment, pipe)


def answer_and_end(assignment: bytes, pipe: Connection) -> None:
    """Run the process of a rank that ends right after its answer to a stage of a capture."""
    pipe.send_bytes(msgspec.msgpack.encode(RankReady()))
    pipe.send_bytes(msgspec.msgpack.encode(CaptureState(1)))
    os._exit(9)


def write_nonsense(assignment: bytes, pipe: Connection) -> None:
    """Run the process of a rank that sends an invalid message."""
    pipe.send_bytes(b"?")
    pipe.poll(None)


def refuse() -> DraftServer:
    """Load no draft: a `BuildDraft` whose file is gone."""
    raise FileNotFoundError(2, "No such file or directory", "/models/head/config.json")


def die() -> DraftServer:
    """End the process while it loads, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def double(region: TensorRegion, pipe: Connection) -> None:
    """Double the tensors that the other process has put, in place."""
    for view in region.get([TensorShape("int64", (3,)), TensorShape("bfloat16", (2, 2))]):
        view *= 2
    pipe.send(True)
