"""Progress on standard error: a line when a step starts, its seconds when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from localcluster.errors import TimedOut


def say(message: str) -> None:
    """One line, at once, on standard error: standard output belongs to answers."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Announce a step, then say how long it took."""
    started = time.monotonic()
    say(f"==> {what}")
    yield
    seconds = time.monotonic() - started
    if seconds >= 1:
        say(f"    {seconds:.0f} s")


def wait_for(
    what: str,
    holds: Callable[[], bool],
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Poll until `holds()`; `check()` runs in between and may raise a better error than a timeout."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        check()
        if time.monotonic() > deadline:
            raise TimedOut(f"{what}: not after {timeout_s:.0f} s")
        time.sleep(0.2)
