"""Budget of exploration: shadow passes and bursts of steps of other shapes, within a share of the worker's time.

Bursts go to the shapes whose comparison with the plan is least sure (`burst_allocation`). Exploration diminishes while
nothing changes, and starts again with a new plan or a change in the steps themselves (Diminishing Exploration, arXiv
2410.05734). Most of what it costs on a steady load is thereby saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log, sqrt

from specdecode_worker.contract import Plan, TreeShape
from specdecode_worker.speculation.burst_allocation import BurstAllocation
from specdecode_worker.speculation.change_detector import ChangeDetector
from specdecode_worker.speculation.guard import TimePerToken

BURST_STEPS = 16
"""Number of steps of a burst, and fewest steps of the plan after it."""
DROPPED_STEPS = 2
"""Number of steps at the start of a burst that warm caches and are not counted."""
MIN_SERIES_STEPS = 8
"""Fewest measured steps of a burst or a probe that say what its shape loses."""
EXPECTED_LOSS = 0.5
"""Expected loss of one step of a burst, in steps at the usual time per token. A burst starts when the budget covers
this loss for all of its steps.
"""
FULL_PACE_STEPS = 1000
"""Number of steps at a load, after a change, during which all of the time counts for exploration. Later
sqrt(FULL_PACE_STEPS / steps) of it counts.
"""


@dataclass(slots=True)
class Burst:
    """Series of steps in which the whole batch runs one shape. ``done`` counts the launched steps."""

    shape: TreeShape
    done: int = 0


@dataclass(slots=True)
class Series:
    """Sums over the measured steps of a burst or of a guard probe. ``shape`` is None if they ran different shapes."""

    concurrency: int
    shape: TreeShape | None
    seconds: float = 0.0
    usual_seconds: float = 0.0
    """Time of as many tokens in steps of the plan."""
    steps: int = 0

    def add(self, shape: TreeShape | None, seconds: float, usual_seconds: float, steps: int) -> None:
        """Add steps with the sums of their seconds and of their usual seconds."""
        self.shape = self.shape if shape == self.shape else None
        self.seconds += seconds
        self.usual_seconds += usual_seconds
        self.steps += steps


@dataclass(slots=True)
class TimeBudget:
    """Account of the extra seconds spent on exploration, compared with a share of the time that counts for it."""

    spent_seconds: float = 0.0

    def affords(self, share: float, counted_seconds: float, price_seconds: float = 0.0) -> bool:
        """Return whether a further ``price_seconds`` keeps the spent time below ``share`` of the counted time."""
        return self.spent_seconds + price_seconds < share * counted_seconds

    def pay(self, seconds: float) -> None:
        """Add ``seconds`` to the spent time. A negative amount (a gain) is no credit."""
        self.spent_seconds += max(seconds, 0.0)


@dataclass(slots=True)
class LoadHistory:
    """Steps of the planned shapes at one load: their time per token, and how many there were since the last change."""

    baseline: TimePerToken = field(default_factory=TimePerToken)
    steps_since_change: int = 0
    detector: ChangeDetector = field(default_factory=ChangeDetector)
    allocation: BurstAllocation = field(default_factory=BurstAllocation)

    @property
    def pace(self) -> float:
        """Share of the time that counts for exploration."""
        return min(1.0, sqrt(FULL_PACE_STEPS / max(self.steps_since_change, 1)))

    def add(self, seconds: float, tokens: float, steps: int) -> None:
        """Add steps with the sums of their seconds and of their tokens per sequence."""
        self.baseline.add(seconds, tokens, steps)
        self.steps_since_change += steps
        if self.detector.add(tokens, steps):
            self.restart()

    def restart(self) -> None:
        """Count from now on: something has changed."""
        self.steps_since_change, self.detector, self.allocation = 0, ChangeDetector(), BurstAllocation()


@dataclass(slots=True)
class Exploration:
    """Exploration state of a worker. Half of the share pays for shadow passes, half for bursts.

    Durations are measured by the caller. The loss of a guard probe is paid like that of a burst, because both try a
    shape that may lose. It is paid once the burst or the probe is over: a single step loses or gains by chance.

    Whatever exploration costs, a burst is followed by at least as many steps of the plan. The shape of the plan must be
    timed above all, and exploration that happens to be faster than the plan would otherwise never end.
    """

    burst: Burst | None = None
    shadow: TimeBudget = field(default_factory=TimeBudget)
    bursts: TimeBudget = field(default_factory=TimeBudget)
    counted_seconds: float = 0.0
    """Time of all steps that counts for exploration."""
    _rested: bool = True  # True if the previous step drafted no shadow nodes.
    _since_burst: int = BURST_STEPS
    _pace: float = 1.0
    _loads: defaultdict[int, LoadHistory] = field(default_factory=lambda: defaultdict(LoadHistory))
    _series: Series | None = None

    def shadows(self, share: float) -> bool:
        """Return whether the next step may draft shadow nodes. At most every second step may."""
        due = self._rested and self.shadow.affords(share / 2, self.counted_seconds)
        self._rested = not due
        return due

    def burst_for(
        self, concurrency: int, running: TreeShape, planned: TreeShape, max_depth: int, share: float
    ) -> Burst | None:
        """Return the burst in progress, start a new one if it is affordable, or return None.

        The candidates of a new burst are plain decoding, the neighbours of the running depth, the planned depth, and
        the deepest chain allowed. The planned shape is a candidate because the guard may hold it back, while the
        planner learns only from steps. There is no burst if ``max_depth`` is 0.
        """
        history = self._loads[concurrency]
        # Plain steps show nothing of a draft that became better, so exploration then goes on as before.
        self._pace = history.pace if running.nodes else 1.0
        burst = self.burst
        if burst is not None and (max_depth == 0 or burst.done >= BURST_STEPS or burst.shape.depth > max_depth):
            self.burst = None
        due = self.burst is None and max_depth > 0 and self._since_burst >= BURST_STEPS
        baseline = history.baseline.seconds
        price = EXPECTED_LOSS * BURST_STEPS * (baseline or 0.0)
        if due and baseline is not None and self.bursts.affords(share / 2, self.counted_seconds, price):
            # Plain steps show whether the drafts became slower or the machine: they wait for no other shape.
            close = {0, running.depth - 1, running.depth + 1, planned.depth}
            depths = {min(max(depth, 0), max_depth) for depth in (*close, max_depth)} - {running.depth}
            shapes = [TreeShape.chain(depth) for depth in sorted(depths)]
            if shapes:
                near = [shape for shape in shapes if shape.depth in close]
                shape = history.allocation.next(shapes, near)
                self.burst, self._since_burst = Burst(shape), 0
        return self.burst

    def restart(self, concurrencies: Iterable[int] | None = None) -> None:
        """Explore at full pace again at these loads, or at all: the plan or the draft is another."""
        for concurrency in self._loads if concurrencies is None else concurrencies:
            self._loads[concurrency].restart()
        if self._series is not None:
            self._series.shape = None  # What is measured so far belongs to the plan before.

    def passed(
        self,
        concurrency: int,
        seconds: float,
        tokens: float,
        *,
        explores: bool,
        shape: TreeShape | None = None,
        shadow_seconds: float = 0.0,
        steps: int = 1,
    ) -> None:
        """Record a step without prefill.

        Args:
            concurrency: Bucket index.
            seconds: Duration of the step.
            tokens: Emitted tokens per sequence.
            explores: The step belongs to a burst or a guard probe, and pays its loss against the usual time per token.
            shape: Shape of all requests of the step; None if they differ, or if a request had no draft ready.
            shadow_seconds: Part of ``seconds`` that was spent on shadow passes.
            steps: Number of equal steps that the other arguments are the sums of.
        """
        self.counted_seconds += self._pace * seconds
        self.shadow.pay(shadow_seconds)
        history = self._loads[concurrency]
        if not explores:
            self._end_series()
            self._since_burst += steps
            history.add(seconds - shadow_seconds, tokens, steps)
        elif history.baseline.seconds is not None:
            if self._series is None or self._series.concurrency != concurrency:
                self._end_series()
                self._series = Series(concurrency, shape)
            self._series.add(shape, seconds, tokens * history.baseline.seconds, steps)

    def _end_series(self) -> None:
        """Pay for the burst or probe that is over. What it lost decides how often its shape runs."""
        series, self._series = self._series, None
        if series is None:
            return
        self.bursts.pay(series.seconds - series.usual_seconds)
        is_timed = series.steps >= MIN_SERIES_STEPS and min(series.seconds, series.usual_seconds) > 0
        if series.shape is not None and is_timed:
            loss = log(series.seconds / series.usual_seconds)
            self._loads[series.concurrency].allocation.add(series.shape, loss)


def changed_loads(before: Plan, after: Plan) -> set[int]:
    """Return the concurrency buckets at which two plans have different rows."""
    if (before.buckets, before.initial) != (after.buckets, after.initial):
        return set(range(len(after.buckets.concurrency) + 1))
    return {row.concurrency for row in set(before.rows) ^ set(after.rows)}
