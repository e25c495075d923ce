"""Distinguishable records, recorders that follow rules with short times, and what their folders hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdecode_worker.capture import ReadStats, Record, Recorder, read_records
from specdecode_worker.capture.live import CaptureLimits
from specdecode_worker.capture.records import decode
from specdecode_worker.capture.segments import list_segments, read_bodies
from specdecode_worker.contract.capture import CaptureRules
from specdecode_worker.sampling.params import Sampling
from support.waiting import until


def record(number: int, *, tokens: int = 20, task: str = "other", time_seconds: float = 0.0, user: str = "") -> Record:
    return Record(
        tokens=tuple(range(number, number + tokens)),
        prompt_length=5,
        sampling=Sampling(max_tokens=tokens, seed=number, temperature=0.5, logit_bias=((3, 1.5),)),
        target="t",
        task=task,
        time_seconds=time_seconds,
        opening=f"{number:016x}",
        user=user,
    )


LIMITS = CaptureLimits(retry=0.2, hang=0.3, tick=0.02)
RULES = CaptureRules(share=1.0)


@contextlib.contextmanager
def live(
    folder: Path, rules: CaptureRules | None = RULES, limits: CaptureLimits = LIMITS, **more: Any
) -> Iterator[Recorder]:
    made = Recorder(folder, rules, limits=limits, seed=0, **more)
    try:
        yield made
    finally:
        made.close(2)


def put(recorder: Recorder, *seeds: int, age: float = 0.0, **more: Any) -> None:
    """Offer a record of each of these numbers, of requests that ended ``age`` seconds ago."""
    for number in seeds:
        recorder.enqueue(record(number, time_seconds=time.time() - age, **more), recorder.epoch)


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the stored records, in order."""
    stats = ReadStats()
    seeds = [one.sampling.seed for one in read_records([folder], stats)]
    assert (stats.torn, stats.unreadable) == (0, 0)
    return sorted(seeds)


def stored(recorder: Recorder, count: int) -> None:
    """Wait until the report counts this many stored records."""
    until(lambda: recorder.report().conversations == count)


def read(folder: Path) -> list[Record]:
    """Return the stored records, whatever their age."""
    records = []
    for segment in list_segments(folder):
        with segment.path.open("rb") as file:
            records += [decode(body) for body in read_bodies(file) if body is not None]
    return records


def settle(recorder: Recorder) -> None:
    """Wait until the rules are applied and every queued record is written or dropped."""
    queue = recorder._queue

    def is_settled() -> bool:
        state = recorder._state
        if state.epoch != recorder._cleared_epoch:
            return False
        return state.rules is None or (
            recorder._applied is state.rules and not len(queue) and not queue._taken and recorder._writer is not None
        )

    until(is_settled)
