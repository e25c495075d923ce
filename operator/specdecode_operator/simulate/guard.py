"""The worker's guard, modelled: per load the pace with and without speculation; it may only lower to depth 0.

The rules are those of specdecode_worker.speculation.guard; decaying sums move by many steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdecode_operator.simulate.walks import MOST_STEPS, Form
from specdecode_worker.contract import GuardCell

ENOUGH = 24
LOSES = ((96, 1.02), (ENOUGH, 1.08), (8, 1.3), (4, 2.0))
WINS = 0.98
PROBE_EVERY, PROBE_STEPS = 400, 24
CHECK_STEPS = 16
PROBE_SHARE = 0.005
MOST_PATIENCE = 16
BY_FAR = LOSES[2:]
FEWEST = BY_FAR[-1][0]
LONG, SHORT = 0.99, 0.97
ASSUMED = 10.0
_EARLY = tuple(steps for steps, _ in reversed(BY_FAR))


@dataclass(slots=True)
class Pace:
    """Seconds per token of one sequence, as a ratio of two decaying sums."""

    keep: float = SHORT
    steps: int = 0
    _seconds: float = 0.0
    _tokens: float = 0.0

    def add(self, steps: int, seconds: float, tokens: float) -> None:
        """``seconds`` and ``tokens`` (of one sequence) are of all ``steps`` together."""
        kept = self.keep**steps
        weight = (1 - kept) / (1 - self.keep) / steps
        self.steps += steps
        self._seconds = kept * self._seconds + weight * seconds
        self._tokens = kept * self._tokens + weight * tokens

    @property
    def pace(self) -> float | None:
        return self.after(ENOUGH)

    def after(self, steps: int) -> float | None:
        return self._seconds / self._tokens if self.steps >= steps and self._tokens > 0 else None

    def take(self, other: Pace) -> None:
        self.steps, self._seconds, self._tokens = max(ENOUGH, other.steps), other._seconds, other._tokens

    def assume(self, seconds: float) -> None:
        self.steps, self._seconds, self._tokens = ENOUGH, ASSUMED * seconds, ASSUMED


@dataclass(slots=True)
class Watch:
    speculative: Pace = field(default_factory=lambda: Pace(LONG))
    lately: Pace = field(default_factory=Pace)
    suppressed: bool = False
    since_verdict: int = 0
    patience: int = PROBE_EVERY
    probe: Pace | None = None
    check: Pace | None = None

    @property
    def probes(self) -> bool:
        return self.suppressed and self.since_verdict >= self.patience

    @property
    def holds(self) -> bool:
        return self.suppressed and self.check is None

    def add(self, steps: int, seconds: float, tokens: float) -> None:
        if self.probes:
            self.probe = self.probe or Pace()
            self.probe.add(steps, seconds, tokens)
        self.speculative.add(steps, seconds, tokens)
        self.lately.add(steps, seconds, tokens)

    def judge(self, plain: Pace) -> None:
        without = plain.pace
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

    def until_verdict(self) -> int:
        """Steps that may pass before the next verdict could fall."""
        if self.check is not None:
            return max(1, CHECK_STEPS - self.check.steps)
        if self.probe is not None:
            return _until(self.probe.steps, (*_EARLY, PROBE_STEPS))
        if self.suppressed:
            return FEWEST if self.probes else max(1, self.patience - self.since_verdict)
        return _until(self.speculative.steps, tuple(steps for steps, _ in reversed(LOSES)))

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


def _until(steps: int, edges: tuple[int, ...]) -> int:
    return next((edge - steps for edge in edges if edge > steps), MOST_STEPS)


def _wait(pace: Pace, without: float) -> int:
    """Steps of which a probe that loses as much would lose no more than its share."""
    ratio = (pace.after(1) or without) / without
    steps = next((steps for steps, bound in reversed(BY_FAR) if ratio > bound), PROBE_STEPS)
    return int(steps * (ratio - 1) / PROBE_SHARE)


def _loses(pace: Pace, without: float, bounds: Sequence[tuple[int, float]]) -> bool:
    for steps, bound in bounds:
        found = pace.after(steps)
        if found is not None:
            return found > bound * without
    return False


Cell = tuple[int, int]


@dataclass(slots=True)
class Guard:
    """Per load the pace with and without speculation; may only lower to depth 0."""

    plain: dict[Cell, Pace] = field(default_factory=dict)
    watches: dict[tuple[Cell, Form], Watch] = field(default_factory=dict)

    def keep(self, planned: Callable[[Cell, Form], bool]) -> None:
        self.watches = {key: watch for key, watch in self.watches.items() if planned(*key)}

    def allows(self, cell: Cell, form: Form) -> bool:
        if form.nodes == 0:
            return True
        watch = self.watches.setdefault((cell, form), Watch())
        return not watch.suppressed or watch.probes

    def probes(self, cell: Cell, form: Form) -> bool:
        watch = self.watches.get((cell, form))
        return watch is not None and watch.probes

    def assume(self, cell: Cell, plain_seconds: float) -> None:
        """What plain decoding took in the calibration at start; where it is known, it stays."""
        pace = self.plain.setdefault(cell, Pace())
        if pace.pace is None:
            pace.assume(plain_seconds)

    def until_verdict(self, cell: Cell) -> int:
        """Steps after which a watch at this load may change its mind: a segment must not run past that."""
        left = [watch.until_verdict() for (where, _), watch in self.watches.items() if where == cell]
        return max(1, min(left, default=MOST_STEPS))

    def measured(self, cell: Cell, form: Form, steps: int, seconds: float, tokens: float) -> None:
        plain = self.plain.setdefault(cell, Pace())
        if form.nodes == 0:
            plain.add(steps, seconds, tokens)
        elif watch := self.watches.get((cell, form)):
            watch.add(steps, seconds, tokens)
        for (where, _), watched in self.watches.items():
            if where == cell:
                watched.since_verdict += steps
                if watched.check is not None and form.nodes == 0:
                    watched.check.add(steps, seconds, tokens)
                watched.judge(plain)

    def cells(self) -> tuple[GuardCell, ...]:
        return tuple(
            GuardCell(
                concurrency=cell[0],
                context=cell[1],
                speculative=watch.speculative.after(FEWEST),
                plain=self.plain.get(cell, Pace()).pace,
                suppressed=watch.holds,
            )
            for (cell, _), watch in sorted(self.watches.items(), key=lambda item: item[0][0])
        )
