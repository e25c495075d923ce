"""Before anybody is served: what steps take at the loads of the plan, timed on made-up requests.

The guard then knows what speculation has to beat from the first request on, instead of learning it from users' time;
and the first report tells the operator what drafting costs, which can compare shapes as soon as it knows acceptance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import median
from typing import Protocol, TypeVar

from specdecode_worker.contract import TreeShape
from specdecode_worker.engine.ipc.messages import Sampling, Submit, Tokens

TIMED_STEPS, DROPPED_STEPS = 10, 3
STEPS_OF_SHAPE = 7
PROMPT_TOKENS = 16
PLAIN = TreeShape(())

T = TypeVar("T")


class Calibrated(Protocol):
    """What an engine offers for it; Engine does."""

    max_model_len: int

    def calibration_loads(self) -> tuple[int, ...]:
        """Numbers of sequences to time, rising."""
        ...

    def calibration_shapes(self) -> tuple[TreeShape, ...]:
        """What to time there besides plain decoding."""
        ...

    def add(self, submit: Submit) -> None: ...
    def step(self) -> list[Tokens]: ...
    def abort(self, request_id: str) -> None: ...
    def run_only(self, shape: TreeShape | None) -> None: ...
    def assume_plain(self, sequences: int, seconds: float) -> None: ...
    def forget_costs(self) -> None: ...
    def forget_traffic(self) -> None: ...


def calibrate(engine: Calibrated, most_seconds: float) -> dict[int, float]:
    """Seconds of a plain step by number of sequences; the largest loads are left out when time runs out, and shapes
    get as much time again.

    Up through the loads and down again, the faster of both: a process that has just started is slower by a third, and
    a guard that thinks plain decoding slower than it is lets drafts lose. Of the way up nothing is reported.
    """
    found: dict[int, float] = {}
    loads = engine.calibration_loads()
    for index, count in _in_time(enumerate((*loads, *reversed(loads))), most_seconds):
        if index == len(loads):
            engine.forget_costs()
        found[count] = min(_plain_step_seconds(engine, count), found.get(count, math.inf))
    for count, seconds in found.items():
        engine.assume_plain(count, seconds)
    # What these steps take stays in the engine's costs.
    for count, shape in _in_time(product(sorted(found), engine.calibration_shapes()), most_seconds):
        engine.run_only(shape)
        _steps(engine, count, shape.depth, STEPS_OF_SHAPE)
    engine.run_only(None)
    engine.forget_traffic()
    return found


def _in_time(items: Iterable[T], most_seconds: float) -> Iterator[T]:
    """Items, until time could run out: each may take up to twice as long as the one before."""
    began = time.monotonic()
    for item in items:
        before = time.monotonic()
        yield item
        now = time.monotonic()
        if now - began + 2 * (now - before) > most_seconds:
            return


def _plain_step_seconds(engine: Calibrated, count: int) -> float:
    engine.run_only(PLAIN)
    return median(_steps(engine, count, 0, DROPPED_STEPS + TIMED_STEPS)[DROPPED_STEPS:])


def _steps(engine: Calibrated, count: int, depth: int, steps: int) -> list[float]:
    """Seconds of so many steps of ``count`` made-up requests, each of which emits ``depth`` + 1 tokens at most."""
    names = [f"calibration-{index}" for index in range(count)]
    # Some emit while others still wait for their prompt's turn.
    most = min(PROMPT_TOKENS + (depth + 1) * steps, engine.max_model_len - PROMPT_TOKENS)
    sampling = Sampling(max_tokens=most, seed=0, temperature=0.0, ignore_eos=True)
    for index, name in enumerate(names):
        engine.add(Submit(request_id=name, prompt=(index % 7 + 1,) * PROMPT_TOKENS, sampling=sampling))
    answering: set[str] = set()
    while len(answering) < count:
        answering |= {tokens.request_id for tokens in engine.step()}
    taken = []
    for _ in range(steps):
        before = time.monotonic()
        engine.step()
        taken.append(time.monotonic() - before)
    for name in names:
        engine.abort(name)
    return taken
