"""The rows of a plan: search for the best shapes at one load, the rule by which a row changes, and all rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from specdecode_operator.api.v1alpha1 import Cause, SpeculationSpec
from specdecode_operator.planning.acceptance import (
    AcceptanceModel,
    Bounds,
    Node,
    Objective,
    Path,
    Position,
    TaskLoad,
    bounds_of,
    chain_of,
    has_own,
    idle,
    lacking,
    names,
    paths_of,
    shape_of,
    tasks_at,
)
from specdecode_operator.planning.estimates import (
    HOUR_SECONDS,
    NORMAL,
    TUNING,
    Batch,
    Estimate,
    Load,
    StepTimeModel,
    confidence,
    mean_time,
)
from specdecode_operator.state.learned import LearnedState, MergeChoice, RowState
from specdecode_worker.contract import OTHER_TASK, Buckets, TreeShape

Shapes = tuple[tuple[str, TreeShape], ...]
"""The shape of every task, in the order of the search's tasks."""
Mix = tuple[dict[str, float], dict[str, float]]
"""Tokens of a step, and share of the sequences, both by task."""


class Met(NamedTuple):
    """A sequence of ``task`` is in such a batch in this share of its steps."""

    task: str
    batch: Batch
    weight: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Shapes of all tasks at one load, with what they bring."""

    shapes: Shapes
    seconds: Estimate
    """Time of the mean step of the mean sequence."""
    passes: int
    """Most draft passes of a step."""
    by_task: dict[str, float]
    """Expected tokens of a step."""
    shares: dict[str, float]
    """Of the running sequences, once these shapes have run for a while."""
    tokens: float
    """Expected tokens of a step, mean over the running sequences."""
    violation: float
    """Share by which the worst objective is missed."""
    tasks: tuple[TaskLoad, ...]
    """Tasks with the drafts that they merge, in the order of the shapes."""

    @property
    def per_token(self) -> float:
        """Seconds per token of one sequence."""
        return self.seconds.mean / self.tokens

    @property
    def rank(self) -> tuple[float, float]:
        """Order of choices, the best first: objectives come before the time per token."""
        return self.violation, self.per_token

    @property
    def depth(self) -> int:
        return max(shape.depth for _, shape in self.shapes)

    @property
    def is_plain(self) -> bool:
        return not any(shape.nodes for _, shape in self.shapes)

    @property
    def is_timed(self) -> bool:
        return self.seconds.weight > 0


RANK = attrgetter("rank")
Found = tuple[Choice, Choice, list[Choice]]
"""The present choice, plain decoding, and candidates."""


@dataclass(frozen=True, slots=True)
class ShapeSearch:
    """Search at one load."""

    times: StepTimeModel
    load: Load
    tasks: tuple[TaskLoad, ...]
    objective: Objective
    known: dict[tuple[Shapes, tuple[str, ...]], Found] = field(default_factory=dict)

    def best(self, now: Shapes, free: Collection[str]) -> Found:
        """Return the present choice, plain decoding, and the candidates that are fast enough for the objective.

        Candidates are the best shapes for each depth, of all ``free`` tasks or of one alone. Others keep their shape.
        """
        key = now, tuple(free)
        if key not in self.known:
            plain_shapes = _changed(now, ((task.name, chain_of(task.bounds.least)) for task in self.tasks), free)
            groups = (free, *((task,) for task in free))
            joint = [_changed(now, shapes, group) for shapes in self.best_by_depth() for group in groups]
            found = self.evaluate([now, plain_shapes, *joint])
            plain, least = found[plain_shapes], self.objective.min_speedup
            fast = [
                one for one in found.values() if least <= 1 or one.is_plain or one.per_token * least <= plain.per_token
            ]
            self.known[key] = found[now], plain, fast
        return self.known[key]

    def best_by_depth(self) -> Iterator[Shapes]:
        """Yield the best shapes of each depth, the least depth first."""
        least = max(task.bounds.least for task in self.tasks)
        for depth in range(least, max([least, *(task.bounds.most for task in self.tasks)]) + 1):
            shapes = self._best_of(depth)
            if shapes is not None:
                yield shapes

    def evaluate(self, candidates: Iterable[Shapes]) -> dict[Shapes, Choice]:
        """Return every candidate with its step time and tokens."""
        bounds, mixes = {task.name: task.bounds for task in self.tasks}, {each: self._mix(each) for each in candidates}
        met = {
            shapes: batches(shapes, bounds, mix[1], self.load.sequences, self._extended(shapes))
            for shapes, mix in mixes.items()
        }
        times = self.times.predict(self.load, (one.batch for each in met.values() for one in each))
        return {shapes: self._choice(shapes, mix, met[shapes], times) for shapes, mix in mixes.items()}

    def _extended(self, shapes: Shapes) -> dict[str, float]:
        """Return the nodes of a step beyond its shapes, by task."""
        return {task.name: task.extended(shape)[1] for task, (_, shape) in zip(self.tasks, shapes, strict=True)}

    def gain(self, one: Choice, two: Choice) -> float:
        """Return log(time per token of ``one`` / of ``two``). While an objective is missed, how much less it is."""
        if one.violation != two.violation:
            return math.log((1 + one.violation) / (1 + two.violation))
        return math.log(one.per_token / two.per_token)

    def gain_error(self, one: Choice, two: Choice) -> float:
        """Return the standard error of the gain. Errors that both choices share do not add."""
        time = one.seconds.relative_variance + two.seconds.relative_variance
        if one.passes == two.passes:
            time = min(time, (math.log(one.seconds.mean / two.seconds.mean) / 2) ** 2)
        pairs = zip(one.tasks, two.tasks, strict=True)
        return math.sqrt(time + sum(_gain_variance(before, after, one, two) for before, after in pairs))

    def moving_demand(self, one: Choice, two: Choice) -> float:
        """Return the share of the tokens that belongs to tasks with a different shape, or with other drafts."""
        steps = zip(one.tasks, one.shapes, two.tasks, two.shapes, strict=True)
        return sum(task.demand for task, shape, other, after in steps if (task, shape) != (other, after))

    def tokens_variance(self, choice: Choice) -> float:
        """Return the variance of log(expected tokens per step)."""
        return sum(
            slope**2 * task.acceptance.rate(at).variance
            for task in choice.tasks
            for at, slope in _slopes(task, choice).items()
        )

    def _mix(self, shapes: Shapes) -> Mix:
        """Return the mix while ``shapes`` run.

        With open arrivals a task's share follows demand / tokens; with a fixed number of clients it does not change.
        Counters do not tell which, so the share is the geometric mean of both.
        """
        tokens = {task.name: task.tokens(shape) for task, (_, shape) in zip(self.tasks, shapes, strict=True)}
        raw = {task.name: math.sqrt(task.share * task.demand / tokens[task.name]) for task in self.tasks}
        return tokens, {name: share / sum(raw.values()) for name, share in raw.items()}

    def _choice(self, shapes: Shapes, mix: Mix, met: list[Met], times: dict[Batch, Estimate]) -> Choice:
        tokens, shares = mix
        seconds = mean_time([(shares[one.task] * one.weight, times[one.batch]) for one in met])
        own = dict.fromkeys(tokens, 0.0)
        for one in met:
            own[one.task] += one.weight * times[one.batch].mean
        violation = self.objective.violation(seconds.mean, (tokens[name] * seconds.mean / own[name] for name in tokens))
        mean = sum(share * tokens[name] for name, share in shares.items())
        passes = max(one.batch.passes for one in met)
        return Choice(shapes, seconds, passes, tokens, shares, mean, violation, self.tasks)

    def _best_of(self, depth: int) -> Shapes | None:
        """Return the best prefix of all nodes by survival among those that are ``depth`` deep."""
        tokens = {task.name: task.acceptance.tokens(chain_of(task.bounds.least)) for task in self.tasks}
        verified = 1 + sum(task.share * task.bounds.least for task in self.tasks)
        deepest = max(task.bounds.least for task in self.tasks)
        passes = max(task.bounds.passes(min(depth, task.bounds.most)) for task in self.tasks)
        steps, best, lowest = self._by_survival(depth), None, (math.inf, math.inf)
        for count in range(len(steps) + 1):
            if count:
                task, node = steps[count - 1]
                verified, tokens[task.name] = verified + task.share, tokens[task.name] + node.survival
                deepest = max(deepest, len(node.path))
            if deepest == depth:
                seconds = self.times.mean(self.load, Batch(passes, verified))
                mean = sum([task.share * tokens[task.name] for task in self.tasks])
                rank = self.objective.violation(seconds, tokens.values()), seconds / mean
                best, lowest = (count, rank) if rank < lowest else (best, lowest)
        if best is None:
            return None
        paths = {task.name: list(paths_of(chain_of(task.bounds.least))) for task in self.tasks}
        for task, node in steps[:best]:
            paths[task.name].append(node.path)
        return tuple((name, shape_of(frozenset(found))) for name, found in paths.items())

    def _by_survival(self, depth: int) -> list[tuple[TaskLoad, Node]]:
        """Return the nodes beyond the least shapes that the bounds allow, of all tasks, likeliest first."""
        found: list[tuple[TaskLoad, Node]] = []
        for task in self.tasks:
            bounds, least = task.bounds, set[Path](paths_of(chain_of(task.bounds.least)))
            nodes = task.acceptance.best_nodes(min(depth, bounds.most), bounds.top_k, bounds.max_nodes)
            more = [node for node in nodes if node.path not in least]
            found += [(task, node) for node in more[: bounds.max_nodes - bounds.least]]
        return sorted(found, key=lambda step: (step[1], step[0].name))


def batches(
    shapes: Shapes,
    bounds: Mapping[str, Bounds],
    shares: Mapping[str, float],
    sequences: float,
    extended: Mapping[str, float] = MappingProxyType({}),
) -> list[Met]:
    """Return the batches that a sequence of each task is in; the weights of a task sum to 1.

    The shape with most draft passes in a batch decides how many a step makes. The other sequences are drawn by
    ``shares``. ``extended`` are nodes beyond the shapes.
    """
    passes = {name: bounds[name].passes(shape.depth) for name, shape in shapes}
    drafted = {name: shape.nodes + extended.get(name, 0.0) for name, shape in shapes}
    others, found = max(0.0, sequences - 1), list[Met]()
    for name, own in drafted.items():
        met, below = list[Met](), 0.0
        for most in sorted({count for count in passes.values() if count >= passes[name]}):
            inside = [(shares[task], nodes) for task, nodes in drafted.items() if passes[task] <= most]
            share = min(1.0, sum(weight for weight, _ in inside))
            nodes = sum(weight * count for weight, count in inside) / share if share > 0 else 0.0
            verified = 1 + (own + others * nodes) / (1 + others)
            met.append(Met(name, Batch(most, round(verified, 1)), share**others - below))
            below = share**others
        often = [one for one in met if one.weight >= TUNING.least_share]
        total = sum(one.weight for one in often)
        found += [Met(name, one.batch, one.weight / total) for one in often]
    return found


def _changed(now: Shapes, shapes: Iterable[tuple[str, TreeShape]], tasks: Collection[str]) -> Shapes:
    """Return ``now`` with the ``shapes`` of ``tasks``."""
    found = dict(shapes)
    return tuple((name, found[name] if name in tasks else shape) for name, shape in now)


def _gain_variance(before: TaskLoad, after: TaskLoad, one: Choice, two: Choice) -> float:
    """Return one task's part of the variance of log(tokens of two / tokens of one).

    Acceptance rates err together over depths, and requests differ in what a change brings; the larger doubt counts.
    Where other drafts are merged, the rates were measured at the same nodes, and their difference errs.
    """
    slopes, others, drafts = _slopes(before, one), _slopes(after, two), 0.0
    if after.differing is not None:
        rates = after.acceptance
        slopes = {at: slope for at, slope in slopes.items() if rates.has(at)}
        drafts = sum(slope**2 * after.differing.get(at, rates.rate(at).variance) for at, slope in others.items())
    errors = [
        (others.get(at, 0.0) - slopes.get(at, 0.0)) * math.sqrt(after.acceptance.rate(at).variance)
        for at in {**slopes, **others}
    ]
    apart, together = sum(error**2 for error in errors), sum(errors) ** 2
    rates_variance = max(apart, TUNING.depth_correlation * together + (1 - TUNING.depth_correlation) * apart)
    change = abs(math.log(two.by_task[after.name] / one.by_task[before.name]))
    weight = (one.shares[before.name] + two.shares[after.name]) / 2
    requests = (weight * min(TUNING.request_spread, change)) ** 2 / max(1.0, before.requests)
    return drafts + max(rates_variance, requests)


def _slopes(task: TaskLoad, choice: Choice) -> dict[Position, float]:
    """Return the derivatives of log(tokens) by the acceptance rates of one task.

    Half of it comes through the tokens of its sequences, half through their number.
    """
    weight = choice.shares[task.name] * (1 + choice.by_task[task.name] / choice.tokens) / 2
    return {at: weight * slope for at, slope in task.acceptance.slopes(dict(choice.shapes)[task.name]).items()}


# The decision for the rows of one load.
#
# One rule: a change is worth its expected gain, less the doubt that waiting resolves for free, less the cost of a
# change. Where only running a shape can resolve the doubt, it is worth a trial if the expected gain of the better of
# both shapes afterwards exceeds the cost of two changes: the knowledge gradient (Frazier, Powell and Dayanik, 2008),
# for a gain that drifts while it is not measured (restless bandits; Whittle, 1988).

LOSES, SUSPENDED = "speculation loses against plain decoding; ", "the guards suspend speculation at this load; "
OUTDATED = "a change point outdated the present shape; "


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A row that changed."""

    row: RowState
    before: TreeShape
    gain: float | None
    """Expected relative gain in tokens per second. None if the change is not for a gain."""
    cause: Cause
    reason: str
    follows: bool = False
    """The row follows the change of another load, whose reason this is."""

    @property
    def is_move(self) -> bool:
        """True if the shape changed, and not the state alone."""
        return self.before != self.row.shape


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Decision for the rows of one load, in the order of the search's tasks."""

    speculation: SpeculationSpec
    learned: LearnedState
    search: ShapeSearch
    rows: Sequence[RowState]
    now: float
    is_suspended: bool
    """The guards of all workers decode plainly here."""
    is_present: bool
    """This is the present load."""

    def changes(self) -> list[Change]:
        """Return the rows that change. They stay where nothing was timed near the load, and while measuring."""
        if not self.rows or not self.search.times.near(self.search.load) or self._is_measuring():
            return []
        if any(row.trial for row in self.rows):
            return self._after_trial()
        return self._stopped() or self._improved()

    def _is_measuring(self) -> bool:
        """Return whether rows that draft wait for reliable estimates with their first change.

        They also wait while the guards suspend speculation: workers decode plainly then, whatever the row says.
        """
        is_first = any(row.depth for row in self.rows) and not any(row.since for row in self.rows)
        return is_first and lacking(self.learned) is not None

    # --- the cases ----------------------------------------------------------------------------------------------------

    def _stopped(self) -> list[Change]:
        """Return the best shapes where plain decoding is surely faster. They wait for no dwell."""
        group = [row for row in self.rows if row.depth]
        now, plain, choices = self._best(group)
        if self.bound(now, plain, TUNING.z) <= TUNING.measured_error - math.log(self.search.objective.min_speedup):
            return []
        better = [choice for choice in choices if self.bound(now, choice, TUNING.z) > 0]
        return self._to(group, now, min(better, key=RANK, default=plain), "loses", LOSES)

    def _improved(self) -> list[Change]:
        """Return the best of the choices that are surely worth a change, or else of those that are worth a trial.

        Where the guards suspend speculation, only a shallower shape is, and it waits for no dwell.
        """
        group = [row for row in self.rows if self.is_free(row)]
        if not group:
            return []
        now, plain, choices = self._best(group)
        timed = max((choice.passes for choice in (now, *choices) if choice.is_timed), default=0)
        others = [choice for choice in choices if choice is not now]
        outdated = all(self._is_outdated(row) for row in group)
        gains = [other for other in others if other.passes <= timed and self.is_worth_it(now, other, outdated)]
        if self.is_suspended:
            # Otherwise the estimates err, and as much for the shallower shape.
            gains = [
                other
                for other in others
                if other.depth < now.depth and self.search.gain(now, other) > 2 * TUNING.measured_error * other.is_plain
                if other.is_plain or self.search.gain(plain, other) > self.least_gain
            ]
            return self._to(group, now, min(gains, key=RANK, default=now), "loses", SUSPENDED)
        if gains:
            return self._to(group, now, min(gains, key=RANK), "gain", OUTDATED if outdated else "")
        worth = [(self._trial_value(now, other, plain), other) for other in others]
        trials = [(value, other) for value, other in worth if value > 0]
        value, best = max(trials, key=lambda one: self.bound(now, one[1], TUNING.z), default=(0.0, now))
        why = f"a trial, worth {100 * value:.1f} % beyond the cost of its changes; "
        return self._to(group, now, best, "probe" if now.is_plain else "trial", why, is_trial=True)

    def _after_trial(self) -> list[Change]:
        """Return the better of the shapes on trial and those before, once the former were timed or their time is over.

        Other shapes were timed before: they must be better by more than step times wander meanwhile.
        """
        since = max(row.since for row in self.rows if row.trial)
        now, _, choices = self._best(self.rows)
        is_timed = now.is_timed and now.seconds.at - since > TUNING.recent_seconds
        if not (is_timed or self.is_suspended) and 0 <= self.now - since < TUNING.window_seconds:
            return []
        # The spec may have changed since the trial began.
        bounds = {row.task: bounds_of(self.speculation, row.task) for row in self.rows}
        settled = tuple((row.task, bounds[row.task].nearest(row.settled_shape)) for row in self.rows)
        before = self.search.evaluate([settled])
        kept = min((*before.values(), *([now] if now.is_timed else [])), key=RANK)
        apart = TUNING.z * math.sqrt(2 * self.search.times.wander / TUNING.trial_polls)
        better = (each for each in choices if each.is_timed and self.search.gain(kept, each) > apart)
        return self._to(self.rows, now, min(better, key=RANK, default=kept), "trial", "after a trial; ")

    # --- what a change is worth ---------------------------------------------------------------------------------------

    def is_worth_it(self, now: Choice, other: Choice, outdated: bool) -> bool:
        """Return whether the gain surely exceeds the least gain of the tasks that change.

        A shape that is outdated by a change point has no claim against another, so less evidence is enough. What only a
        trial can measure is no sure gain.
        """
        if not other.is_timed and self._trial_variance(now, other) > TUNING.measured_error**2:
            return False
        if outdated and self.search.gain(now, other) >= self.least_gain:
            return self.bound(now, other, TUNING.z_changed) > 0
        return self.bound(now, other, TUNING.z) > self.least_gain * self.search.moving_demand(now, other)

    def _trial_value(self, now: Choice, other: Choice, plain: Choice) -> float:
        """Return what a trial is worth. No step is shorter than one that it includes, which bounds the gain."""
        gain, most = self.search.gain(now, other), math.inf
        if not now.is_plain:
            shapes = zip(now.shapes, other.shapes, strict=True)
            includes = all(one.depth <= two.depth and one.nodes <= two.nodes for (_, one), (_, two) in shapes)
            least = max(plain.seconds.mean, now.seconds.mean * includes)
            most = max(0.0, math.log(now.per_token * other.tokens / least))
        return self.trial_value(gain, self._trial_variance(now, other), most)

    def trial_value(self, gain: float, variance: float, most: float = math.inf, share: float = 1.0) -> float:
        """Return the expected gain of a trial, E[max(0, gain)], at most ``most``, less the cost of its changes.

        It costs one change of this share of the tokens, and a second one if it is in vain. Its own error stays.
        """
        error = math.sqrt(max(0.0, variance - TUNING.measured_error**2))
        if error <= 0:
            return -1.0
        expected = error * (_above(gain / error) - _above((gain - most) / error))
        return expected - share * self.least_gain * (1 + NORMAL.cdf(-gain / error))

    def drift_variance(self, seconds: float) -> float:
        """Return the variance of a gain that was not measured for so long.

        ``minDwellSeconds`` says how soon users expect conditions to change.
        """
        return TUNING.drift_per_dwell**2 * max(0.0, seconds) / max(1, self.speculation.limits.min_dwell_seconds)

    def _trial_variance(self, now: Choice, other: Choice) -> float:
        """Return the variance of a gain that only a trial can measure; 0 where it is measured anyway.

        Workers that explore time other chains by themselves while they draft. While they decode plainly, gains drift.
        """
        is_busy = self.is_present and self.now - self.learned.load.at <= TUNING.window_seconds
        if other.is_plain or not is_busy:
            return 0.0
        is_chain = len({shape for _, shape in other.shapes}) == 1 and other.shapes[0][1].is_chain
        if not other.is_timed and not (self.speculation.limits.explore_percent > 0 and is_chain and not now.is_plain):
            return other.seconds.relative_variance - self.search.times.wander
        if other.is_timed and now.is_plain:
            newest = max((cell.at for cell in self.learned.costs if cell.draft_passes), default=0.0)
            return self.drift_variance(self.now - newest - TUNING.window_seconds) - self.search.times.wander
        return 0.0

    def bound(self, now: Choice, other: Choice, z: float) -> float:
        """Return the lower confidence bound of a gain."""
        return self.search.gain(now, other) - z * self.search.gain_error(now, other)

    @property
    def least_gain(self) -> float:
        return math.log(1 + self.speculation.limits.min_gain_percent / 100)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _best(self, group: Sequence[RowState]) -> Found:
        return self.search.best(tuple((row.task, row.shape) for row in self.rows), [row.task for row in group])

    def is_free(self, row: RowState | MergeChoice) -> bool:
        """Return whether a row, or the choice of drafts, may change for a gain.

        The changes of the hour, and its dwell or suspension, decide.
        """
        limits = self.speculation.limits
        if len(recent_changes(row.moves, self.now)) >= limits.max_changes_per_hour:
            return False
        if self.is_suspended:
            return self._is_active(row)
        return not 0 <= self.now - row.since < limits.min_dwell_seconds

    def _is_active(self, row: RowState | MergeChoice) -> bool:
        """Return whether the row's task was drafted for about as recently as any."""
        seen = {cell.task: cell.at for cell in self.learned.acceptance if (cell.depth, cell.parent) == (1, "main")}
        return seen.get(row.task, 0.0) > max(seen.values(), default=0.0) - TUNING.window_seconds

    def _is_outdated(self, row: RowState) -> bool:
        """Return whether a change point invalidated the row's evidence lately, and no change came shortly before it."""
        age, changed_at = HOUR_SECONDS / self.speculation.limits.max_changes_per_hour, self._changed_at(row)
        return 0 <= self.now - changed_at < age and not any(self.now - age < at < changed_at for at in row.moves)

    def _changed_at(self, row: RowState) -> float:
        """Return the time of the last change point of the task's acceptance or of step times here; 0 is never."""
        rates = (cell.changed_at for cell in self.learned.acceptance if cell.task == row.task)
        times = (cell.changed_at for cell in self.search.times.near(self.search.load))
        return max((*rates, *times), default=0.0)

    def _to(
        self, group: Sequence[RowState], now: Choice, best: Choice, cause: Cause, why: str, *, is_trial: bool = False
    ) -> list[Change]:
        """Return the rows of ``group`` whose shape changes or whose trial ends; its end is no change of its own."""
        after, gain = dict(best.shapes), math.expm1(self.search.gain(now, best))
        ends = any(row.trial for row in group)
        return [
            Change(
                row=next_row(row, after[row.task], self.now, is_trial=is_trial, counts=not ends),
                before=row.shape,
                gain=gain,
                cause=cause,
                reason=why + self._reason(row.task, now, best),
            )
            for row in group
            if ends or after[row.task] != row.shape
        ]

    def _reason(self, name: str, now: Choice, best: Choice) -> str:
        task = next(task for task in self.search.tasks if task.name == name)
        rates = ", ".join(f"{ranks[0].mean:.2f}" for ranks in task.acceptance.main)
        gain = self.search.gain(now, best)
        sure = confidence(gain, self.search.gain_error(now, best))
        missed = f"; {100 * now.violation:.0f} % over the objective" if now.violation else ""
        return (
            f"{_text(now, name)} -> {_text(best, name)} a step; acceptance by depth {rates};"
            f" {100 * math.expm1(gain):+.0f} % tokens in the same time, {100 * sure:.0f} % sure{missed}"
        )


def _above(z: float) -> float:
    """Return E[max(0, x)] of a normal x with mean ``z`` and standard deviation 1."""
    return z * NORMAL.cdf(z) + NORMAL.pdf(z) if z > -math.inf else 0.0


def _text(choice: Choice, task: str) -> str:
    shape = dict(choice.shapes)[task]
    name = str(shape) if shape.is_chain and shape.nodes else f"tree {shape}" if shape.nodes else "plain"
    timed = "" if choice.is_timed else " (extrapolated)"
    return f"{name} {choice.seconds.mean * 1000:.1f} ms{timed} for {choice.by_task[task]:.2f} tokens"


# State of a plan row: it runs its shape until another is worth a change, or it is on trial to be timed.


def next_row(row: RowState, shape: TreeShape, now: float, *, is_trial: bool = False, counts: bool = True) -> RowState:
    """Return the row after a change to ``shape``, which runs to be timed if ``is_trial``, or after the end of a trial.

    ``counts`` says whether the change counts against the changes of the hour. The end of a trial does not.
    """
    moves = (*recent_changes(row.moves, now), now) if counts else row.moves
    before = row.shape.parents if is_trial else None
    return row.running(shape, since=row.since if shape == row.shape else now, moves=moves, before=before)


def recent_changes(moves: tuple[float, ...], now: float) -> tuple[float, ...]:
    """Return the times of changes within the last hour. Later ones are of a clock that was ahead."""
    return tuple(at for at in moves if 0 <= now - at < HOUR_SECONDS)


# All rows of a plan: which there are, when their loads are decided again, and the published plan.


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Rows as they should be from now on."""

    rows: tuple[RowState, ...]
    changes: tuple[Change, ...] = ()
    swept_at: float = 0
    """Time when the rows of all loads were last decided."""


def choose(
    speculation: SpeculationSpec,
    learned: LearnedState,
    found: Buckets,
    *,
    max_num_seqs: int,
    now: float,
    held_back: Collection[tuple[int, int]] = (),
    kv_tokens: float | None = None,
    objective: Objective | None = None,
) -> Chosen:
    """Decide the rows of the loads that are due.

    ``max_num_seqs`` and ``kv_tokens`` (None if unknown) are those of one worker. The guards of all workers suspend
    speculation at the loads ``held_back``.
    """
    rows = list(rows_of(speculation, learned, found))
    bounds = {name: bounds_of(speculation, name) for name in names(speculation)}
    changes = [change for row in rows if (change := _within_bounds(row, bounds[row.task], now))]
    after, bounded = {_key(row): row for row in rows}, {change.row.load for change in changes}
    after.update((_key(change.row), change.row) for change in changes)
    due, swept_at = _due(rows, learned, found, now)
    times = StepTimeModel.fit(learned.costs, learned.wander) if due else None
    model, objective = AcceptanceModel(learned, speculation), objective or Objective(speculation.objective)
    for at in due:
        if times is None or at in bounded:
            continue
        group = [row for row in after.values() if row.load == at]
        quiet = idle(learned, [row.task for row in group])
        busy = [row for row in group if row.task not in quiet]
        load = times.typical(found, *at, max_num_seqs)
        search = ShapeSearch(times, load, tasks_at(model, busy, load, kv_tokens), objective)
        is_present = at == learned.load.row(found)
        moved = LoadDecision(speculation, learned, search, busy, now, at in held_back, is_present).changes()
        shapes = {row.task: row.shape for row in (*busy, *(change.row for change in moved))}
        if moved and not any(shape.nodes for shape in shapes.values()):
            moved += [change for row in group if row not in busy and (change := _also_stopped(row, speculation, now))]
        if any(change.is_move for change in moved):
            # A joint choice is one for every row with traffic: those that it left as they were follow no other row.
            after.update((_key(row), row.model_copy(update={"since": row.since or now})) for row in busy)
        after.update((_key(change.row), change.row) for change in moved)
        changes += moved
    settled = tuple(after.values())
    if changes:
        # Rows that never changed follow those that did with this plan, and not with the next one.
        settled = tuple(rows_of(speculation, learned.model_copy(update={"rows": settled}), found))
        changes += [change for row in settled for change in _followed(row, after[_key(row)].shape, changes)]
    return Chosen(rows=settled, changes=tuple(change for change in changes if change.is_move), swept_at=swept_at)


def rows_of(speculation: SpeculationSpec, learned: LearnedState, found: Buckets) -> Iterator[RowState]:
    """Yield one row per load and task.

    A task has rows once it was seen often enough, or at once if the spec says more of it than its name; until then it
    runs those of ``other``. A row that never changed follows depth.initial or, once that changed, the row of ``other``.
    It is no deeper than the row of the nearest lower load that changed.
    """
    known = {_key(row): row for row in learned.rows}
    for task in names(speculation):
        seen = sum(cell.total for cell in learned.acceptance if (cell.task, cell.depth) == (task, 1))
        is_own, bounds, changed = has_own(speculation, task), bounds_of(speculation, task), dict[int, TreeShape]()
        if not (task == OTHER_TASK or is_own or seen >= TUNING.task_samples):
            continue
        for concurrency, context in product(range(len(found.concurrency) + 1), range(len(found.context) + 1)):
            row = known.get((task, concurrency, context))
            row = row or RowState(concurrency=concurrency, context=context, task=task, depth=0)
            start = known.get((OTHER_TASK, concurrency, context))
            if row.since:
                changed[context] = row.shape
            else:
                shape = start.shape if start and start.since and not is_own else chain_of(bounds.initial)
                least = min(shape, changed.get(context, shape), key=attrgetter("depth", "nodes"))
                row = row.running(bounds.nearest(least))
            yield row


def _due(
    rows: Collection[RowState], learned: LearnedState, found: Buckets, now: float
) -> tuple[list[tuple[int, int]], float]:
    """Return the loads to decide, and the time when all were last decided.

    All loads every ``window_seconds``; the present one, and trials, at any time. Without traffic since, only trials.
    """
    loads, swept_at = dict.fromkeys(row.load for row in rows), learned.swept_at
    is_idle = 0 < learned.load.at <= swept_at - TUNING.window_seconds and swept_at <= now
    if not is_idle and not 0 <= now - swept_at < TUNING.window_seconds:
        return list(loads), now
    present = set[tuple[int, int]]() if is_idle else {learned.load.row(found)}
    at_any_time = present | {row.load for row in rows if row.trial}
    return [at for at in loads if at in at_any_time], swept_at


def _key(row: RowState) -> tuple[str, int, int]:
    return row.task, *row.load


def _also_stopped(row: RowState, speculation: SpeculationSpec, now: float) -> Change | None:
    """Return the stop of a row without traffic, once all rows with traffic have stopped."""
    if not row.depth or bounds_of(speculation, row.task).least:
        return None
    off = next_row(row, TreeShape.chain(0), now, counts=False)
    return Change(row=off, before=row.shape, gain=None, cause="loses", reason="all tasks that have traffic stopped")


def _followed(row: RowState, before: TreeShape, changes: Collection[Change]) -> list[Change]:
    """Return the change that a row follows, as a change of that row; nothing if it follows none."""
    alike = [change for change in changes if (change.row.context, change.row.shape) == (row.context, row.shape)]
    return [replace(change, row=row, before=before, follows=True) for change in alike[:1] if row.shape != before]


def _within_bounds(row: RowState, bounds: Bounds, now: float) -> Change | None:
    shape = bounds.nearest(row.shape)
    if shape == row.shape:
        return None
    reason = f"the spec allows depth {bounds.least} to {bounds.most}, {bounds.max_nodes} nodes, {bounds.top_k} a token"
    return Change(row=row.running(shape, since=now), before=row.shape, gain=None, cause="bounds", reason=reason)
