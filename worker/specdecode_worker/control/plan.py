"""Choice of the shape of a step: the plan's row for load, context and task, or another whose worth is to be known."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import log, sqrt

from specdecode_worker.contract import MAX_RANKS, OTHER_TASK, Buckets, GuardCell, Plan, PlanState, TreeShape

MIN_STEPS = 24
"""Number of steps after which a time per token is considered reliable. STOP_RULES detect a large loss sooner."""
STOP_RULES = ((96, 1.02), (MIN_STEPS, 1.08), (8, 1.3), (4, 2.0))
"""Stop rules as (steps, ratio): after ``steps`` steps, speculation stops if its time per token is more than ``ratio``
times that of plain decoding. A large loss can be distinguished from noise after a few steps. A small loss takes more
steps to detect, but costs little until then. The first rule applies to the slow average, the others to the fast
average, which follows a change sooner.
"""
RESUME_RATIO = 0.98
"""Highest ratio of time per token to plain decoding at which a probe resumes speculation."""
PROBE_EVERY, PROBE_STEPS = 400, 24
"""Steps between probes of a stopped shape, and steps of one probe."""
CHECK_STEPS = 16
"""Number of plain steps directly after a stop that must confirm it. On a machine that has become slower, speculation
appears to lose until plain decoding is timed on that machine as well.
"""
PROBE_SHARE = 0.005
"""Largest share of the steps between probes that a probe may lose. A shape that loses much therefore waits longer."""
MAX_PROBE_WAIT_FACTOR = 16
"""Largest wait for a probe, in multiples of PROBE_EVERY. Each failed probe doubles the wait up to this limit."""
EARLY_STOP_RULES = STOP_RULES[2:]
"""Stop rules that also end a probe early."""
MIN_REPORTED_STEPS = EARLY_STOP_RULES[-1][0]
"""Fewest steps after which a stop rule applies, and a time per token is reported."""
SLOW_DECAY, FAST_DECAY = 0.99, 0.97
"""Factors by which the sums of the slow and of the fast average decay at each step."""
_ASSUMED = 10.0
"""Weight, in tokens, of a plain time per token that was measured at start."""


@dataclass(slots=True)
class TimePerToken:
    """Time per token of one sequence, in seconds: the ratio of two exponentially decaying sums."""

    decay: float = FAST_DECAY
    steps: int = 0
    _seconds: float = 0.0
    _tokens: float = 0.0

    def add(self, seconds: float, tokens_per_sequence: float, steps: int = 1) -> None:
        """Add steps that took ``seconds`` and emitted ``tokens_per_sequence`` tokens per sequence, all together.

        Several steps count as equal steps one after the other. The engine adds each step alone; the simulator adds
        many at once.
        """
        decay = self.decay**steps
        weight = (1 - decay) / (1 - self.decay) / steps
        self.steps += steps
        self._seconds = decay * self._seconds + weight * seconds
        self._tokens = decay * self._tokens + weight * tokens_per_sequence

    @property
    def seconds(self) -> float | None:
        """Seconds per token, or None before MIN_STEPS steps."""
        return self.after(MIN_STEPS)

    def after(self, steps: int) -> float | None:
        """Return the seconds per token, or None before ``steps`` steps."""
        return self._seconds / self._tokens if self.steps >= steps else None

    def copy_from(self, other: TimePerToken) -> None:
        """Replace these sums by those of ``other`` and count at least MIN_STEPS steps."""
        self.steps, self._seconds, self._tokens = max(MIN_STEPS, other.steps), other._seconds, other._tokens

    def assume(self, seconds: float) -> None:
        """Set the time per token to a value measured elsewhere, with a weight that later steps soon outweigh."""
        self.steps, self._seconds, self._tokens = MIN_STEPS, _ASSUMED * seconds, _ASSUMED


@dataclass(slots=True)
class ShapeState:
    """Measurements and guard state of one shape at one load.

    ``speculative`` and ``recent`` are the slow and the fast average of its time per token. ``steps_since_decision``
    counts the steps at this load since the last decision, ``probe_wait`` is the number of steps to wait before a probe.
    ``probe`` is the time per token of a probe in progress. ``check`` is that of plain decoding since a stop that is not
    yet confirmed.
    """

    speculative: TimePerToken = field(default_factory=lambda: TimePerToken(SLOW_DECAY))
    recent: TimePerToken = field(default_factory=TimePerToken)
    suppressed: bool = False
    steps_since_decision: int = 0
    probe_wait: int = PROBE_EVERY
    probe: TimePerToken | None = None
    check: TimePerToken | None = None

    @property
    def probe_due(self) -> bool:
        """True if the shape is stopped, the stop is confirmed, and it has waited long enough for a probe."""
        return self.is_confirmed_stop and self.steps_since_decision >= self.probe_wait

    @property
    def is_confirmed_stop(self) -> bool:
        """True if the shape is stopped and plain decoding confirmed that the machine itself is not slower."""
        return self.suppressed and self.check is None

    def add(self, seconds: float, tokens: float, steps: int) -> None:
        """Add speculative steps to the averages, and to the probe if one is due."""
        if self.probe_due:
            self.probe = self.probe or TimePerToken()
            self.probe.add(seconds, tokens, steps)
        self.speculative.add(seconds, tokens, steps)
        self.recent.add(seconds, tokens, steps)

    def judge(self, plain: TimePerToken) -> None:
        """Stop, confirm, probe or resume the shape. Do nothing until the time per token of plain decoding is known."""
        plain_seconds = plain.seconds
        if plain_seconds is None:
            return
        if self.check is not None:
            self._confirm_stop(self.check, plain)
        elif self.probe is not None:
            self._judge_probe(self.probe, plain_seconds)
        elif not self.suppressed and (
            _is_slower(self.recent, plain_seconds, STOP_RULES[1:])
            or _is_slower(self.speculative, plain_seconds, STOP_RULES[:1])
        ):
            self.suppressed, self.steps_since_decision, self.check = True, 0, TimePerToken()
            wait = max(PROBE_EVERY, _steps_until_probe(self.recent, plain_seconds))
            self.probe_wait = min(wait, MAX_PROBE_WAIT_FACTOR * PROBE_EVERY)

    def _confirm_stop(self, check: TimePerToken, plain: TimePerToken) -> None:
        """Confirm a stop after CHECK_STEPS plain steps, or revoke it if speculation was faster than these steps."""
        plain_seconds = check.after(CHECK_STEPS)
        if plain_seconds is None:
            return
        self.check = None
        speculative = self.recent.after(1)
        if speculative is not None and speculative < plain_seconds:
            self.suppressed, self.probe_wait = False, PROBE_EVERY
            plain.copy_from(check)

    def _judge_probe(self, probe: TimePerToken, plain_seconds: float) -> None:
        """End a probe: resume speculation if it won, else lengthen the wait before the next probe."""
        won = probe.after(PROBE_STEPS)
        if won is not None and won <= RESUME_RATIO * plain_seconds:
            self.suppressed, self.probe_wait = False, PROBE_EVERY
            for time_per_token in (self.speculative, self.recent):
                time_per_token.copy_from(probe)
        elif won is not None or _is_slower(probe, plain_seconds, EARLY_STOP_RULES):
            wait = max(2 * self.probe_wait, _steps_until_probe(probe, plain_seconds))
            self.probe_wait = min(wait, MAX_PROBE_WAIT_FACTOR * PROBE_EVERY)
        else:
            return
        self.probe, self.steps_since_decision = None, 0


Cell = tuple[int, int]
"""Bucket indices of concurrency and context."""


class Guard:
    """Record of step times by load and shape that decides which shapes may run.

    The guard reads no clock: `record_step` receives the duration of each step.
    """

    def __init__(self) -> None:
        self._plain: dict[Cell, TimePerToken] = {}
        self._states: dict[tuple[Cell, TreeShape], ShapeState] = {}

    def without_shapes(self) -> Guard:
        """Return a guard that knows the plain times of this one and nothing of any shape."""
        guard = Guard()
        guard._plain = self._plain
        return guard

    def retain_planned(self, planned: Callable[[Cell, TreeShape], bool]) -> None:
        """Forget shapes for which ``planned`` returns False.

        If such a shape is planned again later, the new plan is based on new evidence.
        """
        self._states = {key: state for key, state in self._states.items() if planned(*key)}

    def allows(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Return whether ``shape`` may run at this load now. Plain decoding is always allowed."""
        if shape.nodes == 0:
            return True
        state = self._states.setdefault(((concurrency, context), shape), ShapeState())
        return not state.suppressed or state.probe_due

    def is_probe(self, concurrency: int, context: int, shape: TreeShape) -> bool:
        """Return whether a run of ``shape`` at this load now would be a probe after a stop."""
        state = self._states.get(((concurrency, context), shape))
        return state is not None and state.probe_due

    def assume(self, concurrency: int, context: int, plain_seconds: float) -> None:
        """Set the time per token of plain decoding at this load from a measurement made at start.

        A value that is already known is kept.
        """
        time_per_token = self._plain.setdefault((concurrency, context), TimePerToken())
        if time_per_token.seconds is None:
            time_per_token.assume(plain_seconds)

    def states_at(self, concurrency: int, context: int) -> list[ShapeState]:
        """Return the states of the shapes at this load."""
        return [state for (cell, _), state in self._states.items() if cell == (concurrency, context)]

    def record_step(
        self, concurrency: int, context: int, shape: TreeShape, seconds: float, tokens: float, steps: int = 1
    ) -> None:
        """Record a step without prefill, and update the state of every shape at this load.

        Steps of a shape for which `allows` was never called belong to exploration and are ignored.

        Args:
            concurrency: Bucket index.
            context: Bucket index.
            shape: Draft shape of all requests of the step.
            seconds: Duration of the step.
            tokens: Emitted tokens per sequence.
            steps: Number of equal steps that ``seconds`` and ``tokens`` are the sums of. No decision may be due
                before the last of them.
        """
        cell = (concurrency, context)
        plain = self._plain.setdefault(cell, TimePerToken())
        if shape.nodes == 0:
            plain.add(seconds, tokens, steps)
        elif state := self._states.get((cell, shape)):
            state.add(seconds, tokens, steps)
        for state in self.states_at(concurrency, context):
            state.steps_since_decision += steps
            if state.check is not None and shape.nodes == 0:
                state.check.add(seconds, tokens, steps)
            state.judge(plain)

    def cells(self) -> tuple[GuardCell, ...]:
        """Return one report entry per load and shape, in the order of the loads."""
        return tuple(
            GuardCell(
                concurrency=cell[0],
                context=cell[1],
                speculative=state.speculative.after(MIN_REPORTED_STEPS),
                plain=self._plain.get(cell, TimePerToken()).seconds,
                suppressed=state.is_confirmed_stop,
            )
            for (cell, _), state in sorted(self._states.items(), key=lambda item: item[0][0])
        )


def _steps_until_probe(time_per_token: TimePerToken, plain_seconds: float) -> int:
    """Return the number of steps to wait so that a probe loses at most PROBE_SHARE of them.

    The loss is estimated from ``time_per_token``; ``plain_seconds`` is the time per token of plain decoding.
    """
    ratio = (time_per_token.after(1) or plain_seconds) / plain_seconds
    steps = next((steps for steps, bound in reversed(EARLY_STOP_RULES) if ratio > bound), PROBE_STEPS)
    return int(steps * (ratio - 1) / PROBE_SHARE)


def _is_slower(time_per_token: TimePerToken, plain_seconds: float, bounds: Sequence[tuple[int, float]]) -> bool:
    """Return whether ``time_per_token`` exceeds the first of the ``bounds`` for which it has enough steps."""
    for steps, bound in bounds:
        seconds = time_per_token.after(steps)
        if seconds is not None:
            return seconds > bound * plain_seconds
    return False


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
# Bursts go to the shapes whose comparison with the plan is least sure (`BurstAllocation`). Exploration diminishes
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
        # Plain steps show nothing of a draft that became better, so exploration then goes on as before. Time in which
        # nothing may be explored does not count: it would be made up for at once.
        self._pace = 0.0 if not (max_depth and share) else history.pace if running.nodes else 1.0
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
        if self._pace:  # what is lost in time that does not count is not made up for either
            self.bursts.pay(series.seconds - series.usual_seconds)
        is_timed = series.steps >= MIN_SERIES_STEPS and min(series.seconds, series.usual_seconds) > 0
        if series.shape is not None and is_timed:
            loss = log(series.seconds / series.usual_seconds)
            self._loads[series.concurrency].allocation.add(series.shape, loss)


def changed_loads(before: Plan, after: Plan) -> set[int]:
    """Return the concurrency buckets at which two plans have different rows, or allow other shapes."""
    if (before.buckets, before.initial, before.max_depth) != (after.buckets, after.initial, after.max_depth):
        return set(range(len(after.buckets.concurrency) + 1))
    return {row.concurrency for row in set(before.rows) ^ set(after.rows)}
