"""The one thing that a worker decides: to stop speculating where it measures that speculation loses.

Per load (concurrency and context bucket) it keeps the time per token with and without speculation. It may only lower
to depth 0, says so in the report, and probes again from time to time: the less often, the more probes were in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdecode_worker.contract import GuardCell, TreeShape

ENOUGH = 24
"""Steps of either kind before a verdict."""
LOSES = ((96, 1.02), (ENOUGH, 1.08), (8, 1.3), (4, 2.0))
"""(steps, ratio): behind so many steps speculation stops if its time per token is so much above plain decoding's. The
more a shape loses the sooner that is told from noise; what loses little costs little until it is. The first is asked of
a long memory, the others of a short one, which sees a change soon."""
WINS = 0.98
"""Below it a probe brings speculation back."""
PROBE_EVERY, PROBE_STEPS = 400, 24
"""While stopped: after this many steps the plan's shape runs for this many."""
CHECK_STEPS = 16
"""Plain steps right behind a stop that have to bear it out: a machine that has become slower looks like a draft that
loses, until plain decoding is timed on it too."""
PROBE_SHARE = 0.005
"""Of all steps that a probe may lose: what loses much is probed the later for it."""
MOST_PATIENCE = 16
"""Each probe in vain doubles the wait for the next, up to so many times PROBE_EVERY."""
BY_FAR = LOSES[2:]
"""These end a probe early, too."""
FEWEST = BY_FAR[-1][0]
LONG, SHORT = 0.99, 0.97
"""Of a pace's sums, kept from step to step."""
_ASSUMED = 10.0
"""Plain steps that what was measured at start weighs as much as."""


@dataclass(slots=True)
class Pace:
    """Time per token of one sequence, as a ratio of two decaying sums."""

    keep: float = SHORT
    steps: int = 0
    _seconds: float = 0.0
    _tokens: float = 0.0

    def add(self, seconds: float, tokens_per_sequence: float) -> None:
        self.steps += 1
        self._seconds = self.keep * self._seconds + seconds
        self._tokens = self.keep * self._tokens + tokens_per_sequence

    @property
    def seconds(self) -> float | None:
        return self.after(ENOUGH)

    def after(self, steps: int) -> float | None:
        """Seconds per token; None before so many steps."""
        return self._seconds / self._tokens if self.steps >= steps else None

    def take(self, other: Pace) -> None:
        self.steps, self._seconds, self._tokens = max(ENOUGH, other.steps), other._seconds, other._tokens

    def assume(self, seconds: float) -> None:
        """What was measured elsewhere, until enough steps of its own have said otherwise."""
        self.steps, self._seconds, self._tokens = ENOUGH, _ASSUMED * seconds, _ASSUMED


@dataclass(slots=True)
class Watch:
    """One shape at one load: its pace, in a long memory and ``lately``, and the verdict; ``probe`` is the pace of a
    probe under way, ``check`` that of plain decoding since a stop which it has not borne out yet."""

    speculative: Pace = field(default_factory=lambda: Pace(LONG))
    lately: Pace = field(default_factory=Pace)
    suppressed: bool = False
    since_verdict: int = 0
    patience: int = PROBE_EVERY
    probe: Pace | None = None
    check: Pace | None = None

    @property
    def probes(self) -> bool:
        """Whether the shape has waited long enough to be tried again."""
        return self.suppressed and self.since_verdict >= self.patience

    @property
    def holds(self) -> bool:
        """Whether plain decoding has borne out the stop: until then it may have been the machine's doing."""
        return self.suppressed and self.check is None

    def add(self, seconds: float, tokens: float) -> None:
        if self.probes:
            self.probe = self.probe or Pace()
            self.probe.add(seconds, tokens)
        self.speculative.add(seconds, tokens)
        self.lately.add(seconds, tokens)

    def judge(self, plain: Pace) -> None:
        """Nothing is said before both paces are known."""
        without = plain.seconds
        if without is None:
            return
        if self.check is not None:
            self._judge_stop(self.check, plain)
        elif self.probe is not None:
            self._judge_probe(self.probe, without)
        elif not self.suppressed and self._loses(without):
            self.suppressed, self.since_verdict, self.check = True, 0, Pace()
            self.patience = max(PROBE_EVERY, _wait(self.lately, without))

    def _loses(self, without: float) -> bool:
        return _loses(self.lately, without, LOSES[1:]) or _loses(self.speculative, without, LOSES[:1])

    def _judge_stop(self, check: Pace, plain: Pace) -> None:
        without = check.after(CHECK_STEPS)
        if without is None:
            return
        self.check = None
        speculative = self.lately.after(1)
        if speculative is not None and speculative < without:
            self.suppressed, self.patience = False, PROBE_EVERY
            plain.take(check)

    def _judge_probe(self, probe: Pace, without: float) -> None:
        won = probe.after(PROBE_STEPS)
        if won is not None and won <= WINS * without:
            self.suppressed, self.patience = False, PROBE_EVERY
            for pace in (self.speculative, self.lately):
                pace.take(probe)
        elif won is not None or _loses(probe, without, BY_FAR):
            wait = max(2 * self.patience, _wait(probe, without))
            self.patience = min(wait, MOST_PATIENCE * PROBE_EVERY)
        else:
            return
        self.probe, self.since_verdict = None, 0


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
        return not watch.suppressed or watch.probes

    def probes(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Whether ``shape`` runs, if it does, to be tried again after it had lost."""
        watch = self._watches.get(((concurrency, context), shape))
        return watch is not None and watch.probes

    def assume(self, concurrency: int, context: int, plain_seconds: float) -> None:
        """What plain decoding was measured to take per token before anybody was served. Where it is known, it stays."""
        pace = self._plain.setdefault((concurrency, context), Pace())
        if pace.seconds is None:
            pace.assume(plain_seconds)

    def measured(self, concurrency: int, context: int, shape: TreeShape, seconds: float, tokens: float) -> None:
        """A step without prefill took ``seconds`` and brought ``tokens`` per sequence. Shapes that nobody asked
        about are exploration's."""
        cell = (concurrency, context)
        plain = self._plain.setdefault(cell, Pace())
        if shape.nodes == 0:
            plain.add(seconds, tokens)
        elif watch := self._watches.get((cell, shape)):
            watch.add(seconds, tokens)
        for (where, _), watched in self._watches.items():
            if where == cell:
                watched.since_verdict += 1
                if watched.check is not None and shape.nodes == 0:
                    watched.check.add(seconds, tokens)
                watched.judge(plain)

    def cells(self) -> tuple[GuardCell, ...]:
        """One a load and shape."""
        return tuple(
            GuardCell(
                concurrency=cell[0],
                context=cell[1],
                speculative=watch.speculative.after(FEWEST),
                plain=self._plain.get(cell, Pace()).seconds,
                suppressed=watch.holds,
            )
            for (cell, _), watch in sorted(self._watches.items(), key=lambda item: item[0][0])
        )


def _wait(pace: Pace, without: float) -> int:
    """Steps of which a probe that loses as much would lose no more than its share."""
    ratio = (pace.after(1) or without) / without
    steps = next((steps for steps, bound in reversed(BY_FAR) if ratio > bound), PROBE_STEPS)
    return int(steps * (ratio - 1) / PROBE_SHARE)


def _loses(pace: Pace, without: float, bounds: Sequence[tuple[int, float]]) -> bool:
    """By the first bound for which there are steps enough."""
    for steps, bound in bounds:
        found = pace.after(steps)
        if found is not None:
            return found > bound * without
    return False
