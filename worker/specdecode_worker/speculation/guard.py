"""Guard that stops speculation where it is measured to be slower than plain decoding.

For each load (concurrency and context bucket) the guard keeps the time per token with and without speculation. It can
only lower the draft depth to 0, and it reports when it does. It probes a stopped shape again from time to time, and
waits longer after each failed probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdecode_worker.contract import GuardCell, TreeShape

ENOUGH = 24
"""Number of steps after which a time per token is considered reliable. A large loss is recognised sooner, see LOSES."""
LOSES = ((96, 1.02), (ENOUGH, 1.08), (8, 1.3), (4, 2.0))
"""Stop rules as (steps, ratio): after ``steps`` steps, speculation stops if its time per token is more than ``ratio``
times that of plain decoding. A large loss can be distinguished from noise after a few steps. A small loss takes more
steps to detect, but costs little until then. The first rule applies to the slow average, the others to the fast
average, which follows a change sooner.
"""
WINS = 0.98
"""Highest ratio of time per token to plain decoding at which a probe resumes speculation."""
PROBE_EVERY, PROBE_STEPS = 400, 24
"""Steps between probes of a stopped shape, and steps of one probe."""
CHECK_STEPS = 16
"""Number of plain steps directly after a stop that must confirm it. On a machine that has become slower, speculation
appears to lose until plain decoding is timed on that machine as well.
"""
PROBE_SHARE = 0.005
"""Largest share of the steps between probes that a probe may lose. A shape that loses much therefore waits longer."""
MOST_PATIENCE = 16
"""Largest wait between probes, in multiples of PROBE_EVERY. Each failed probe doubles the wait up to this limit."""
BY_FAR = LOSES[2:]
"""Stop rules that also end a probe early."""
FEWEST = BY_FAR[-1][0]
"""Fewest steps after which a stop rule applies, and a time per token is reported."""
LONG, SHORT = 0.99, 0.97
"""Factors by which the sums of the slow and of the fast average decay at each step."""
_ASSUMED = 10.0
"""Weight, in tokens, of a plain time per token that was measured at start."""


@dataclass(slots=True)
class Pace:
    """Time per token of one sequence, in seconds: the ratio of two exponentially decaying sums."""

    keep: float = SHORT
    steps: int = 0
    _seconds: float = 0.0
    _tokens: float = 0.0

    def add(self, seconds: float, tokens_per_sequence: float) -> None:
        """Add a step of ``seconds`` that emitted ``tokens_per_sequence`` tokens per sequence."""
        self.steps += 1
        self._seconds = self.keep * self._seconds + seconds
        self._tokens = self.keep * self._tokens + tokens_per_sequence

    @property
    def seconds(self) -> float | None:
        """Seconds per token, or None before ENOUGH steps."""
        return self.after(ENOUGH)

    def after(self, steps: int) -> float | None:
        """Return the seconds per token, or None before ``steps`` steps."""
        return self._seconds / self._tokens if self.steps >= steps else None

    def take(self, other: Pace) -> None:
        """Replace these sums by those of ``other`` and count at least ENOUGH steps."""
        self.steps, self._seconds, self._tokens = max(ENOUGH, other.steps), other._seconds, other._tokens

    def assume(self, seconds: float) -> None:
        """Set the time per token to a value measured elsewhere, with a weight that later steps soon outweigh."""
        self.steps, self._seconds, self._tokens = ENOUGH, _ASSUMED * seconds, _ASSUMED


@dataclass(slots=True)
class Watch:
    """Measurements and guard state of one shape at one load.

    ``speculative`` and ``lately`` are the slow and the fast average of its time per token. ``since_verdict`` counts the
    steps at this load since the last decision, ``patience`` is the number of steps to wait before a probe. ``probe`` is
    the time per token of a probe in progress. ``check`` is that of plain decoding since a stop that is not yet
    confirmed.
    """

    speculative: Pace = field(default_factory=lambda: Pace(LONG))
    lately: Pace = field(default_factory=Pace)
    suppressed: bool = False
    since_verdict: int = 0
    patience: int = PROBE_EVERY
    probe: Pace | None = None
    check: Pace | None = None

    @property
    def probes(self) -> bool:
        """True if the shape is stopped and has waited long enough for a probe."""
        return self.suppressed and self.since_verdict >= self.patience

    @property
    def holds(self) -> bool:
        """True if the shape is stopped and plain decoding confirmed that the machine itself is not slower."""
        return self.suppressed and self.check is None

    def add(self, seconds: float, tokens: float) -> None:
        """Add a speculative step to the averages, and to the probe if one is due."""
        if self.probes:
            self.probe = self.probe or Pace()
            self.probe.add(seconds, tokens)
        self.speculative.add(seconds, tokens)
        self.lately.add(seconds, tokens)

    def judge(self, plain: Pace) -> None:
        """Stop, confirm, probe or resume the shape. Do nothing until the time per token of plain decoding is known."""
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
        """Return whether either average meets a stop rule."""
        return _loses(self.lately, without, LOSES[1:]) or _loses(self.speculative, without, LOSES[:1])

    def _judge_stop(self, check: Pace, plain: Pace) -> None:
        """Confirm a stop after CHECK_STEPS plain steps, or revoke it if speculation was faster than these steps."""
        without = check.after(CHECK_STEPS)
        if without is None:
            return
        self.check = None
        speculative = self.lately.after(1)
        if speculative is not None and speculative < without:
            self.suppressed, self.patience = False, PROBE_EVERY
            plain.take(check)

    def _judge_probe(self, probe: Pace, without: float) -> None:
        """End a probe: resume speculation if it won, else lengthen the wait before the next probe."""
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


Cell = tuple[int, int]
"""Bucket indices of concurrency and context."""


class Guard:
    """Record of step times by load and shape that decides which shapes may run.

    The guard reads no clock: `measured` receives the duration of each step.
    """

    def __init__(self) -> None:
        self._plain: dict[Cell, Pace] = {}
        self._watches: dict[tuple[Cell, TreeShape], Watch] = {}

    def keep(self, planned: Callable[[Cell, TreeShape], bool]) -> None:
        """Forget shapes for which ``planned`` returns False.

        If such a shape is planned again later, the new plan is based on new evidence.
        """
        self._watches = {key: watch for key, watch in self._watches.items() if planned(*key)}

    def allows(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Return whether ``shape`` may run at this load now. Plain decoding is always allowed."""
        if shape.nodes == 0:
            return True
        watch = self._watches.setdefault(((concurrency, context), shape), Watch())
        return not watch.suppressed or watch.probes

    def probes(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Return whether a run of ``shape`` at this load now would be a probe after a stop."""
        watch = self._watches.get(((concurrency, context), shape))
        return watch is not None and watch.probes

    def assume(self, concurrency: int, context: int, plain_seconds: float) -> None:
        """Set the time per token of plain decoding at this load from a measurement made at start.

        A value that is already known is kept.
        """
        pace = self._plain.setdefault((concurrency, context), Pace())
        if pace.seconds is None:
            pace.assume(plain_seconds)

    def measured(self, concurrency: int, context: int, shape: TreeShape, seconds: float, tokens: float) -> None:
        """Record a step without prefill, and update the state of every shape at this load.

        Steps of a shape for which `allows` was never called belong to exploration and are ignored.

        Args:
            concurrency: Bucket index.
            context: Bucket index.
            shape: Draft shape of all requests of the step.
            seconds: Duration of the step.
            tokens: Emitted tokens per sequence.
        """
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
        """Return one report entry per load and shape, in the order of the loads."""
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
    """Return the number of steps to wait so that a probe loses at most PROBE_SHARE of them.

    The loss is estimated from ``pace``; ``without`` is the time per token of plain decoding.
    """
    ratio = (pace.after(1) or without) / without
    steps = next((steps for steps, bound in reversed(BY_FAR) if ratio > bound), PROBE_STEPS)
    return int(steps * (ratio - 1) / PROBE_SHARE)


def _loses(pace: Pace, without: float, bounds: Sequence[tuple[int, float]]) -> bool:
    """Return whether ``pace`` exceeds the first of the ``bounds`` for which it has enough steps."""
    for steps, bound in bounds:
        found = pace.after(steps)
        if found is not None:
            return found > bound * without
    return False
