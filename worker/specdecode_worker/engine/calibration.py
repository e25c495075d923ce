"""Warm-up and calibration of step times at start, on synthetic requests at the loads of the plan.

The guard then has the plain step times, which speculation must beat, from the first request on, without measurements
during serving. The first report also contains the costs of drafting, so that the operator can compare tree shapes as
soon as acceptance rates are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.sampling.params import Sampling

if TYPE_CHECKING:
    from specdecode_worker.engine.engine import Engine

TIMED_STEPS, DROPPED_STEPS = 10, 3
STEPS_OF_SHAPE = 7
PROMPT_TOKENS = 16
PLAIN = TreeShape(())

T = TypeVar("T")


def warm_up(engine: Engine) -> None:
    """Run one request to its end, so that one-time costs do not delay the first request of a client."""
    sampling = Sampling(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    engine.add(Submit(request_id="warm-up", prompt=(1,) * 4, sampling=sampling, arrival_seconds=time.monotonic()))
    while not engine.idle:
        engine.step()


def calibrate(engine: Engine, most_seconds: float) -> dict[int, float]:
    """Measure step times and pass the plain ones to the engine.

    Plain steps are timed at ascending and then at descending loads, and the faster time counts. A process that has
    just started is slower by a third, and with plain times that are too high the guard would accept drafts that slow
    decoding down. The step costs of the ascending pass are discarded. The tree shapes are timed afterwards; their
    times are recorded in the step costs of the engine.

    Args:
        engine: Engine to calibrate.
        most_seconds: Time limit of the plain steps, in seconds, and again of the tree shapes. When time runs out, the
            largest loads are left out.

    Returns:
        Seconds of a plain step by number of sequences.
    """
    plain_seconds: dict[int, float] = {}
    loads = engine.calibration_loads()
    for index, count in _in_time(enumerate((*loads, *reversed(loads))), most_seconds):
        if index == len(loads):
            engine.reset_step_costs()
        plain_seconds[count] = min(_plain_step_seconds(engine, count), plain_seconds.get(count, math.inf))
    for count, seconds in plain_seconds.items():
        engine.set_plain_step_time(count, seconds)
    # These times remain in the step costs of the engine.
    for count, shape in _in_time(product(sorted(plain_seconds), engine.calibration_shapes()), most_seconds):
        engine.force_shape(shape)
        _steps(engine, count, shape.depth, STEPS_OF_SHAPE)
    engine.force_shape(None)
    engine.reset_traffic()
    return plain_seconds


def _in_time(items: Iterable[T], most_seconds: float) -> Iterator[T]:
    """Yield items until the next one might exceed the time limit. It may take twice as long as the previous one."""
    began = time.monotonic()
    for item in items:
        before = time.monotonic()
        yield item
        now = time.monotonic()
        if now - began + 2 * (now - before) > most_seconds:
            return


def _plain_step_seconds(engine: Engine, count: int) -> float:
    engine.force_shape(PLAIN)
    return median(_steps(engine, count, 0, DROPPED_STEPS + TIMED_STEPS)[DROPPED_STEPS:])


def _steps(engine: Engine, count: int, depth: int, steps: int) -> list[float]:
    """Run ``steps`` steps of ``count`` synthetic requests, and return the seconds of each.

    A step emits at most ``depth`` + 1 tokens of each request. A short context has room for fewer steps.
    """
    prompt_tokens = min(PROMPT_TOKENS, engine.max_model_len // 4)
    names = [f"calibration-{index}" for index in range(count)]
    # Requests already emit tokens while others wait for prefill, so PROMPT_TOKENS is added to the limit.
    max_tokens = min(PROMPT_TOKENS + (depth + 1) * steps, engine.max_model_len - prompt_tokens)
    steps = min(steps, max_tokens // (depth + 1))
    sampling = Sampling(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for index, name in enumerate(names):
        engine.add(Submit(request_id=name, prompt=(index % 7 + 1,) * prompt_tokens, sampling=sampling))
    answering: set[str] = set()
    while len(answering) < count:
        answering |= {tokens.request_id for tokens in engine.step()}
    step_seconds = []
    for _ in range(steps):
        before = time.monotonic()
        engine.step()
        step_seconds.append(time.monotonic() - before)
    for name in names:
        engine.abort(name)
    while not engine.idle:  # the last step may be in flight
        engine.step()
    return step_seconds
