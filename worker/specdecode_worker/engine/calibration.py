"""Before anybody is served: what plain decoding takes at the loads of the plan, timed on made-up requests.

The guard then knows what speculation has to beat from the first request on, instead of learning it from users' time.
"""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Protocol

from specdecode_worker.engine.messages import Sampling, Submit, Tokens

TIMED_STEPS, DROPPED_STEPS = 10, 3
PROMPT_TOKENS = 16


class Calibrated(Protocol):
    """What an engine offers for it; Engine does."""

    def calibration_loads(self) -> tuple[int, ...]:
        """Numbers of sequences to time, rising."""
        ...

    def add(self, submit: Submit) -> None: ...
    def step(self) -> list[Tokens]: ...
    def abort(self, request_id: str) -> None: ...
    def run_plainly(self, plainly: bool) -> None: ...
    def assume_plain(self, sequences: int, seconds: float) -> None: ...
    def forget_traffic(self) -> None: ...


def calibrate(engine: Calibrated, most_seconds: float) -> dict[int, float]:
    """Seconds of a plain step by number of sequences; the largest loads are left out when time runs out.

    Up through the loads and down again, the faster of both: a process that has just started is slower by a third, and
    a guard that thinks plain decoding slower than it is lets drafts lose.
    """
    began = time.monotonic()
    found: dict[int, float] = {}
    engine.run_plainly(True)
    loads = engine.calibration_loads()
    for count in (*loads, *reversed(loads)):
        before = time.monotonic()
        found[count] = min(_plain_step_seconds(engine, count), found.get(count, math.inf))
        now = time.monotonic()
        if now - began + 2 * (now - before) > most_seconds:  # the next load takes up to twice as long
            break
    for count, seconds in found.items():
        engine.assume_plain(count, seconds)
    engine.run_plainly(False)
    engine.forget_traffic()
    return found


def _plain_step_seconds(engine: Calibrated, count: int) -> float:
    names = [f"calibration-{index}" for index in range(count)]
    sampling = Sampling(
        max_tokens=PROMPT_TOKENS + DROPPED_STEPS + TIMED_STEPS, seed=0, temperature=0.0, ignore_eos=True
    )
    for index, name in enumerate(names):
        engine.add(Submit(request_id=name, prompt=(index % 7 + 1,) * PROMPT_TOKENS, sampling=sampling))
    answering: set[str] = set()
    while len(answering) < count:
        answering |= {tokens.request_id for tokens in engine.step()}
    taken = []
    for _ in range(DROPPED_STEPS + TIMED_STEPS):
        before = time.monotonic()
        engine.step()
        taken.append(time.monotonic() - before)
    for name in names:
        engine.abort(name)
    return median(taken[DROPPED_STEPS:])
