"""The decision for the rows of one load. Pure.

One rule: a change is worth its expected gain, less the doubt that waiting resolves for free, less the cost of a change.
Where only running a shape can resolve the doubt, it is worth a trial if the expected gain of the better of both shapes
afterwards exceeds the cost of two changes: the knowledge gradient (Frazier, Powell and Dayanik, 2008), for a gain that
drifts while it is not measured (restless bandits; Whittle, 1988).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import Cause, SpeculationSpec
from specdecode_operator.planning.acceptance_model import lacking
from specdecode_operator.planning.estimates import NORMAL, confidence
from specdecode_operator.planning.shape_search import RANK, Choice, Found, ShapeSearch
from specdecode_operator.planning.tuning import HOUR_SECONDS, TUNING
from specdecode_operator.state.learned import LearnedState, MergeChoice, RowState
from specdecode_worker.contract import TreeShape

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
        if not (is_timed or self.is_suspended) and self.now - since < TUNING.window_seconds:
            return []
        before = self.search.evaluate([tuple((row.task, row.settled_shape) for row in self.rows)])
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
        return self.now - row.since >= limits.min_dwell_seconds

    def _is_active(self, row: RowState | MergeChoice) -> bool:
        """Return whether the row's task was drafted for about as recently as any."""
        seen = {cell.task: cell.at for cell in self.learned.acceptance if (cell.depth, cell.parent) == (1, "main")}
        return seen.get(row.task, 0.0) > max(seen.values(), default=0.0) - TUNING.window_seconds

    def _is_outdated(self, row: RowState) -> bool:
        """Return whether a change point invalidated the row's evidence lately, and no change came shortly before it."""
        age, changed_at = HOUR_SECONDS / self.speculation.limits.max_changes_per_hour, self._changed_at(row)
        return self.now - changed_at < age and not any(self.now - age < at < changed_at for at in row.moves)

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
    """Return the times of changes within the last hour."""
    return tuple(at for at in moves if now - at < HOUR_SECONDS)
