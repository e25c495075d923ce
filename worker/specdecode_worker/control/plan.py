"""Choice of the shape of a step: the plan's row for load, context and task, or another whose worth is to be known."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import log, sqrt

from specdecode_worker.contract import MAX_RANKS, OTHER_TASK, Buckets, Plan, PlanState, TreeShape
from specdecode_worker.control.guard import TimePerToken

# Selection of the plan row for a load. The only decision made here is the bucket of the load.


class PlanRefused(ValueError):
    """Error for a plan of another deployment, or of an older version than the current plan."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bucket indices of concurrency and context in the plan, and the task of a request."""

    concurrency: int
    context: int
    task: str


class Dispatcher:
    """Current plan of a worker, read by load with hysteresis between concurrency buckets."""

    def __init__(self, uid: str, draft_hash: str, plan: Plan | None = None) -> None:
        self.plan = plan or Plan(uid=uid)
        self._shapes = _shapes_of(self.plan)
        self._uid, self.draft_hash = uid, draft_hash
        self.accepts_any_draft = False
        """True during a draft trial, whose two drafts both run the rows of the plan, as all other workers do."""
        self._concurrency_bucket = 0

    @property
    def matches_draft(self) -> bool:
        """True if the plan has no rows, or its rows apply to the loaded draft."""
        return not self.plan.rows or self.accepts_any_draft or self.plan.draft == self.draft_hash

    @property
    def state(self) -> PlanState:
        """Summary of the current plan for the report."""
        plan = self.plan
        return PlanState(
            uid=plan.uid,
            version=plan.version,
            draft=plan.draft,
            matches_draft=self.matches_draft,
            quiet=plan.quiet,
            buckets=plan.buckets,
            tasks=plan.tasks,
        )

    def set_plan(self, plan: Plan) -> None:
        """Replace the current plan.

        Raises:
            PlanRefused: The plan is for another deployment, or is an older version of this deployment's plan.
        """
        if self._uid and plan.uid != self._uid:
            raise PlanRefused(f"the plan is for uid {plan.uid!r}, this worker belongs to {self._uid!r}")
        if plan.draft == self.plan.draft and plan.uid == self.plan.uid and plan.version < self.plan.version:
            raise PlanRefused(f"plan version {plan.version} is older than {self.plan.version}, which runs")
        self.plan, self._shapes = plan, _shapes_of(plan)
        self._concurrency_bucket = min(self._concurrency_bucket, len(plan.buckets.concurrency))

    def load(self, running: int) -> int:
        """Return the concurrency bucket of ``running`` sequences, and remember it for the hysteresis."""
        self._concurrency_bucket = _with_hysteresis(self.plan.buckets, self._concurrency_bucket, running)
        return self._concurrency_bucket

    def context(self, tokens: int) -> int:
        """Return the context bucket of a length in tokens. Edges are inclusive."""
        return bisect_left(self.plan.buckets.context, tokens)

    def shape(self, load: Load) -> TreeShape:
        """Return the planned shape for this load, or ``initial`` without a row or with another draft than planned."""
        if not self.matches_draft:
            return self.plan.initial
        shape = self._shapes.get(load)
        if shape is None:
            shape = self._shapes.get(Load(load.concurrency, load.context, OTHER_TASK))
        return self.plan.initial if shape is None else shape


def _shapes_of(plan: Plan) -> dict[Load, TreeShape]:
    """Return the shapes of the rows by load, which a step looks up faster than in up to 512 rows."""
    return {Load(row.concurrency, row.context, row.task): row.shape for row in plan.rows}


def _with_hysteresis(buckets: Buckets, current: int, running: int) -> int:
    """Return the next bucket: a higher one only if its edge is exceeded by the hysteresis, a lower one at once."""
    edges = buckets.concurrency
    exact = bisect_left(edges, running)
    if exact <= current:
        return exact
    entered = sum(running > edge * (1 + buckets.hysteresis) for edge in edges)
    return max(current, entered)


# Plain step time as a function of the number of sequences, as measured at start.
#
# A bucket of the plan covers several numbers of sequences, and drafts change their distribution, because requests end
# at different times. Without a correction, drafts would appear faster than they are. Step times are therefore scaled to
# the upper edge of the bucket before they are compared.


class PlainStepTimes:
    """Piecewise linear step time by number of sequences, extrapolated beyond the measured points.

    With fewer than two points the curve is constant.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []

    def learn(self, sequences: int, seconds: float) -> None:
        """Set the step time in seconds for this number of sequences."""
        others = [point for point in self._points if point[0] != sequences]
        self._points = sorted([*others, (sequences, seconds)])

    def scaled(self, seconds: float, sequences: float, edge: int) -> float:
        """Scale the ``seconds`` of a step of ``sequences`` to a step of ``edge`` sequences.

        ``sequences`` may be the mean of several steps.
        """
        before, after = self._at(sequences), self._at(edge)
        return seconds * after / before if before > 0 and after > 0 else seconds

    def _at(self, sequences: float) -> float:
        points = self._points
        if len(points) < 2:
            return 1.0
        right = min(max(bisect_left(points, (sequences, 0.0)), 1), len(points) - 1)
        (low, least), (high, most) = points[right - 1 : right + 1]
        return least + (most - least) * (sequences - low) / (high - low)


# Choice of the shape that the next burst of exploration runs.
#
# Bursts go to the shapes whose comparison with the plan is least sure: in proportion to the variance of their loss over
# the square of its mean (optimal computing budget allocation; Chen, Lin, Yücesan and Chick, 2000). A shape that surely
# loses gets few. The budget of exploration pays for losses, so it lasts for more bursts of the shapes that matter.

PRIOR_BURSTS, PRIOR_VARIANCE = 4.0, 0.15**2
"""Variance of the loss of one burst before any was measured, and number of bursts that it counts for. Sixteen steps of
one sequence err by about 15 %.
"""
FAR_LOSS = 0.15
"""Expected loss of a shape that is neither plain nor a neighbour of the running one, before it was measured."""
LEAST_LOSS = 0.05
"""Loss, or gain, below which a shape gets no more bursts than at this one."""
LEAST_SHARE = 0.1
"""Fewest bursts of a shape, as a share of those of the least sure shape."""


@dataclass(slots=True)
class MeasuredLoss:
    """Loss of one shape: log of its time per token over that of the plan. Mean and variance over bursts."""

    started: int = 0
    """Number of bursts, measured or not."""
    _measured: int = 0
    _mean: float = 0.0
    _squares: float = 0.0

    def add(self, loss: float) -> None:
        """Add the loss of one burst."""
        self._measured += 1
        distance = loss - self._mean
        self._mean += distance / self._measured
        self._squares += distance * (loss - self._mean)

    def need(self, expected: float) -> float:
        """Return the number of bursts that the shape should have, up to a factor. ``expected`` is its loss a priori."""
        variance = (self._squares + PRIOR_BURSTS * PRIOR_VARIANCE) / (PRIOR_BURSTS + max(0, self._measured - 1))
        return variance / max(LEAST_LOSS, abs(self._mean if self._measured else expected)) ** 2


@dataclass(slots=True)
class BurstAllocation:
    """Bursts at one load since the last change."""

    _losses: defaultdict[TreeShape, MeasuredLoss] = field(default_factory=lambda: defaultdict(MeasuredLoss))

    def next(self, shapes: Sequence[TreeShape], near: Collection[TreeShape]) -> TreeShape:
        """Return the one of the ``shapes`` that the next burst runs. ``near`` are those that may be as fast."""
        losses = [self._losses[shape] for shape in shapes]
        needs = [loss.need(0.0 if shape in near else FAR_LOSS) for shape, loss in zip(shapes, losses, strict=True)]
        least = LEAST_SHARE * max(needs)
        after = [(loss.started + 1) / max(need, least) for loss, need in zip(losses, needs, strict=True)]
        index = after.index(min(after))
        losses[index].started += 1
        return shapes[index]

    def add(self, shape: TreeShape, loss: float) -> None:
        """Add the measured loss of one burst of ``shape``."""
        self._losses[shape].add(loss)


# Detection of a change in the tokens per step at one load, by cumulative sums (CUSUM).
#
# A cumulative sum adds how far each window lies from the mean of earlier ones, in standard deviations, less a slack
# (E. S. Page, Continuous inspection schemes, 1954). It reacts to a lasting shift, and not to one unusual window.

WINDOW_STEPS = 128
"""Fewest steps of a window. A request spans several windows, so windows differ as requests do."""
MIN_WINDOWS = 8
"""Number of windows before the first comparison."""
MEMORY_WINDOWS = 64
"""Number of windows that the mean and the deviation remember."""
SLACK, THRESHOLD, LARGEST = 1.0, 12.0, 4.0
"""In standard deviations: the difference without effect, the sum that is a change, and the most that one window counts
for. A large shift is detected after four windows.
"""
LEAST_DEVIATION = 0.01
"""Smallest standard deviation, as a share of the mean."""


@dataclass(slots=True)
class ChangeDetector:
    """Detector for the steps of one load that run its planned shapes."""

    _windows: int = 0
    _mean: float = 0.0
    _variance: float = 0.0
    _above: float = 0.0
    _below: float = 0.0
    _steps: int = 0
    _tokens: float = 0.0

    def add(self, tokens: float, steps: int) -> bool:
        """Add steps with the sum of their tokens per sequence, and return whether tokens per step have changed."""
        self._steps, self._tokens = self._steps + steps, self._tokens + tokens
        if self._steps < WINDOW_STEPS:
            return False
        value, self._steps, self._tokens = self._tokens / self._steps, 0, 0.0
        self._compare(value)
        # A window that may belong to a change would hide it: it would widen the deviation.
        if max(self._above, self._below) < LARGEST - SLACK:
            self._remember(value)
        return max(self._above, self._below) >= THRESHOLD

    def _compare(self, value: float) -> None:
        """Add the distance of a window to the cumulative sums."""
        if self._windows < MIN_WINDOWS:
            return
        deviation = max(sqrt(self._variance * (1 + 1 / self._windows)), LEAST_DEVIATION * self._mean)
        score = min(max((value - self._mean) / deviation, -LARGEST), LARGEST) if deviation else 0.0
        self._above = max(0.0, self._above + score - SLACK)
        self._below = max(0.0, self._below - score - SLACK)

    def _remember(self, value: float) -> None:
        """Add a window to the mean and the variance."""
        self._windows = min(self._windows + 1, MEMORY_WINDOWS)
        distance = value - self._mean
        self._mean += distance / self._windows
        self._variance += (distance * (value - self._mean) - self._variance) / self._windows


# Shadow scores: drafted tokens beyond the verified tree, scored against the tokens that are emitted later.
#
# The target's tokens do not depend on the draft, so a path that was never verified gives the same information as one
# that was.


@dataclass(frozen=True, slots=True)
class ShadowDraft:
    """Main path drafted after the token at index ``root``.

    ``ranked[d]`` holds the draft's best tokens for index root + 1 + d, drafted on the assumption that ``ranked[e][0]``
    was emitted at every e < d. Depths up to ``verified`` are counted at acceptance and not here.
    """

    root: int
    ranked: tuple[tuple[int, ...], ...]
    verified: int
    depth_limit: int
    """Synthetic limit on accepted depth: every score at a larger depth is a miss or is not reached."""


@dataclass(frozen=True, slots=True)
class Score:
    """Depth (from 1) and rank (MAX_RANKS for a miss) of one token."""

    depth: int
    rank: int


def scores(shadow: ShadowDraft, tokens: list[int]) -> list[Score] | None:
    """Return the scores of the depths beyond the verified ones, up to and including the first wrong token.

    Return None while too few tokens have been emitted to know them.
    """
    depth_scores: list[Score] = []
    for level, ranked in enumerate(shadow.ranked):
        index = shadow.root + 1 + level
        if index >= len(tokens):
            return None
        rank = ranked.index(tokens[index]) if tokens[index] in ranked else MAX_RANKS
        rank = MAX_RANKS if level >= shadow.depth_limit else rank
        if level >= shadow.verified:
            depth_scores.append(Score(level + 1, rank))
        if rank != 0:
            break
    return depth_scores


# Budget of exploration: shadow passes and bursts of steps of other shapes, within a share of the worker's time.
#
# Bursts go to the shapes whose comparison with the plan is least sure (`burst_allocation`). Exploration diminishes
# while nothing changes, and starts again with a new plan or a change in the steps themselves (Diminishing Exploration,
# arXiv 2410.05734). Most of what it costs on a steady load is thereby saved.

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
