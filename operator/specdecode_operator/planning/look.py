"""One look at the rows of one load: what they may run, what each choice would bring, and how a row moves. Pure.

``moves`` and ``trials`` decide by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from specdecode_operator.api.v1alpha1 import Cause, SpeculationSpec
from specdecode_operator.planning.options import Options, weigh
from specdecode_operator.planning.situation import Shapes, Situation
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_worker.contract import TreeShape

HOUR_SECONDS = 3600.0
GROWTH = 4
"""Of the dwell, from move to move within an hour."""

ABSENT_SECONDS = 60.0
"""A task that was drafted for so long before another runs no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A row that moved."""

    row: RowState
    before: TreeShape
    gain: float | None
    cause: Cause
    reason: str

    @property
    def is_move(self) -> bool:
        """Else only what is remembered of the row changes."""
        return self.before != self.row.shape


@dataclass(frozen=True, slots=True)
class Look:
    """The rows stand in the order of the situation's tasks."""

    speculation: SpeculationSpec
    learned: LearnedState
    situation: Situation
    rows: tuple[RowState, ...]
    now: float
    held: bool
    """The guards of all workers run plainly here."""
    here: bool
    """This is the present load."""
    known: dict[tuple[str, ...], tuple[Options, Situation]] = field(default_factory=dict)
    """What was weighed in this look, by the tasks that may move."""

    @property
    def shapes(self) -> Shapes:
        return tuple((row.task, row.shape) for row in self.rows)

    @property
    def least_gain(self) -> float:
        return self.speculation.hysteresis.min_gain_percent / 100

    def options(self, group: list[RowState]) -> tuple[Options, Situation]:
        """What the rows of ``group`` may run, together and each for itself, while the others stay."""
        key = tuple(row.task for row in group)
        if key not in self.known:
            self.known[key] = self._weighed(group)
        return self.known[key]

    def _weighed(self, group: list[RowState]) -> tuple[Options, Situation]:
        now = dict(self.shapes)
        around = self.situation.with_only([row.task for row in group], now)
        best = list(around.best())
        alone = [self._with(row.task, dict(shapes)[row.task]) for shapes in best for row in group if len(group) > 1]
        return weigh(around, [self.shapes, around.plain(), *best, *alone]), around

    def _with(self, task: str, shape: TreeShape) -> Shapes:
        return tuple((name, shape if name == task else old) for name, old in self.shapes)

    def fast_enough(self, options: Options, plain: Shapes) -> FastEnough:
        most = options.by_shapes[plain].per_token / self.situation.promise.min_speedup
        return FastEnough(options, most)

    def may_move(self, row: RowState) -> bool:
        rested = self.now - row.since >= self._dwell(row) and (row.depth or self.now >= row.off_until)
        return bool(rested) and self.has_moves_left(row)

    def has_moves_left(self, row: RowState) -> bool:
        """Of those that an hour allows."""
        return len(self._moves(row)) < self.speculation.hysteresis.max_changes_per_hour

    def _dwell(self, row: RowState) -> float:
        """Seconds that a row stands. Evidence only gathers while nothing changes, so every further move is likelier
        chance than the one before, and is waited for GROWTH times as long, until acceptance or the cost of steps is
        seen to change, or the hour is over."""
        changed_at = self._changed_at(row)
        count = sum(at > changed_at for at in self._moves(row))
        return float(self.speculation.hysteresis.min_dwell_seconds * GROWTH ** max(0, count - 1))

    def is_there(self, row: RowState) -> bool:
        """Whether the row's task was drafted for about as lately as any."""
        seen = {cell.task: cell.at for cell in self.learned.acceptance if (cell.depth, cell.parent) == (1, "main")}
        return seen.get(row.task, 0.0) > max(seen.values(), default=0.0) - ABSENT_SECONDS

    def is_outdated(self, row: RowState) -> bool:
        """Whether what its shape was chosen by was seen to change lately, and the row stood for long: since so long
        as the moves that an hour allows are apart when they share it out."""
        pace = HOUR_SECONDS / self.speculation.hysteresis.max_changes_per_hour
        changed_at = self._changed_at(row)
        return row.since < changed_at and self.now - changed_at < pace <= self.now - row.since

    def _changed_at(self, row: RowState) -> float:
        """When acceptance or the cost of steps was last seen to change for good; 0 is never."""
        here = self.situation
        acceptance = (cell.changed_at for cell in self.learned.acceptance if cell.task == row.task)
        return max(here.times.changed_at(here.load, here.context), *acceptance, 0.0)

    def _moves(self, row: RowState) -> tuple[float, ...]:
        return tuple(at for at in row.moves if self.now - at < HOUR_SECONDS)

    def counted(self, change: Change) -> Change:
        moves = (*self._moves(change.row), self.now)
        return replace(change, row=change.row.model_copy(update={"moves": moves}))

    def to(
        self, group: Iterable[RowState], shapes: Shapes, options: Options, *, cause: Cause, why: str = ""
    ) -> list[Change]:
        """The rows of ``group`` that move to ``shapes``."""
        after = dict(shapes)
        gain = options.gain(self.shapes, shapes)
        changes = []
        for row in group:
            if after[row.task] != row.shape:
                moved = row.running(after[row.task], since=self.now, probing=False, trial=False)
                reason = why + self._reason(row.task, shapes, options)
                changes.append(Change(row=moved, before=row.shape, gain=gain, cause=cause, reason=reason))
        return changes

    def _reason(self, name: str, shapes: Shapes, options: Options) -> str:
        before, after = options.by_shapes[self.shapes], options.by_shapes[shapes]
        task = next(task for task in options.situation.tasks if task.name == name)
        chances = ", ".join(f"{chance.p:.2f}" for chance in task.rates.chain)
        gain = 100 * (before.per_token / after.per_token - 1)
        sure = 100 * options.confidence(self.shapes, shapes, 0.0)
        promise = f"; {100 * before.violation:.0f} % over the objective" if before.violation else ""
        return (
            f"{before.told(name)} -> {after.told(name)} a step; acceptance by depth {chances};"
            f" {gain:+.0f} % tokens in the same time, {sure:.0f} % sure{promise}"
        )


@dataclass(frozen=True, slots=True)
class FastEnough:
    """Whether shapes keep the least speedup; plain decoding always does."""

    options: Options
    most_per_token: float

    def __call__(self, shapes: Shapes) -> bool:
        ours = self.options.by_shapes[shapes].per_token
        return not with_drafts(shapes) or ours <= self.most_per_token * (1 + 1e-9) or self._not_asked

    @property
    def _not_asked(self) -> bool:
        return self.options.situation.promise.min_speedup <= 1


def with_drafts(shapes: Shapes) -> bool:
    return any(shape.nodes for _, shape in shapes)
