"""The one thing that a worker decides: to stop speculating where it measures that speculation loses.

Per load (concurrency and context bucket) it keeps the time per token with and without speculation. It may only lower
to depth 0, says so in the report, and probes again from time to time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specdecode_worker.contract import GuardCell, TreeShape

ENOUGH = 24
"""Steps of either kind before a verdict."""
LOSES, WINS = 1.05, 0.98
"""Speculative over plain time per token: above the first speculation stops, below the second it comes back."""
PROBE_EVERY, PROBE_STEPS = 400, 24
"""While stopped: after this many plain steps the plan's shape runs for this many."""
_DECAY = 0.97


@dataclass(slots=True)
class Pace:
    """Time per token of one sequence, as a ratio of two decaying sums."""

    steps: int = 0
    _seconds: float = 0.0
    _tokens: float = 0.0

    def add(self, seconds: float, tokens_per_sequence: float) -> None:
        self.steps += 1
        self._seconds = _DECAY * self._seconds + seconds
        self._tokens = _DECAY * self._tokens + tokens_per_sequence

    @property
    def seconds(self) -> float | None:
        return self._seconds / self._tokens if self.steps >= ENOUGH else None


@dataclass(slots=True)
class Watch:
    """One shape at one load: its pace and the verdict."""

    speculative: Pace = field(default_factory=Pace)
    suppressed: bool = False
    since_verdict: int = 0


Cell = tuple[int, int]  # buckets of concurrency and context


class Guard:
    """Time is an argument: `measured` is called with each step's duration."""

    def __init__(self) -> None:
        self._plain: dict[Cell, Pace] = {}
        self._watches: dict[tuple[Cell, TreeShape], Watch] = {}

    def keep(self, planned: Callable[[Cell, TreeShape], bool]) -> None:
        """Forgets shapes that are no longer planned: one that is planned anew comes with new evidence."""
        self._watches = {key: watch for key, watch in self._watches.items() if planned(*key)}

    def allows(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Whether ``shape`` may run at this load now."""
        if shape.nodes == 0:
            return True
        watch = self._watches.setdefault(((concurrency, context), shape), Watch())
        return not watch.suppressed or watch.since_verdict >= PROBE_EVERY

    def measured(self, concurrency: int, context: int, shape: TreeShape, seconds: float, tokens: float) -> None:
        """A step without prefill took ``seconds`` and brought ``tokens`` per sequence. Shapes that nobody asked
        about are exploration's."""
        cell = (concurrency, context)
        plain = self._plain.setdefault(cell, Pace())
        if shape.nodes == 0:
            plain.add(seconds, tokens)
        elif watch := self._watches.get((cell, shape)):
            if watch.suppressed and watch.since_verdict == PROBE_EVERY:
                watch.speculative = Pace()
            watch.speculative.add(seconds, tokens)
        for (where, _), watched in self._watches.items():
            if where == cell:
                watched.since_verdict += 1
                _judge(watched, plain)

    def cells(self) -> tuple[GuardCell, ...]:
        """One a load and shape."""
        return tuple(
            GuardCell(
                concurrency=cell[0],
                context=cell[1],
                speculative=watch.speculative.seconds,
                plain=self._plain.get(cell, Pace()).seconds,
                suppressed=watch.suppressed,
            )
            for (cell, _), watch in sorted(self._watches.items(), key=lambda item: item[0][0])
        )


def _judge(watch: Watch, plain: Pace) -> None:
    with_it, without = watch.speculative.seconds, plain.seconds
    if with_it is None or without is None:
        return
    probed = watch.since_verdict >= PROBE_EVERY + PROBE_STEPS
    if not watch.suppressed and with_it > LOSES * without:
        watch.suppressed, watch.since_verdict = True, 0
    elif watch.suppressed and probed:
        watch.suppressed, watch.since_verdict = with_it > WINS * without, 0
