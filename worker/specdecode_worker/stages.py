"""Seconds that the stages of this process's start take, for the worker's report."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from specdecode_worker.contract import StartSeconds

log = logging.getLogger(__name__)
Item = TypeVar("Item")
_seconds: dict[str, float] | None = dict.fromkeys(StartSeconds.model_fields, 0.0)
_started: StartSeconds | None = None


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the time inside this context as time of the stage ``name``, a field of StartSeconds."""
    began = time.monotonic()
    try:
        yield
    finally:
        if _seconds is not None:
            _seconds[name] += time.monotonic() - began


def staged(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; the time to get each of them counts as time of the stage ``name``."""
    iterator = iter(items)
    while True:
        with stage(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def finish_start() -> None:
    """Keep the times as they are from now on."""
    global _seconds, _started
    if _seconds is not None:
        _started = StartSeconds(**{name: round(seconds, 3) for name, seconds in _seconds.items()})
        log.info("seconds of the start: %s", ", ".join(f"{name} {seconds:.1f}" for name, seconds in _seconds.items()))
        _seconds = None


def start_seconds() -> StartSeconds | None:
    """Return the times of the start; None while the process starts."""
    return _started
