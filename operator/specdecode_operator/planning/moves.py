"""What moves the rows of one load: a stop, a gain, a trial, a probe, in this order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.memory import Kept, RowMemory
from specdecode_operator.planning.options import Options, weigh
from specdecode_operator.planning.situation import Shapes, Situation
from specdecode_worker.contract import OTHER_TASK, TreeShape

CERTAINTY = 0.9
LONGEST_PATIENCE_SECONDS = 3600.0
FRESH_SECONDS = 120.0
"""Cells of speculative steps that are younger need no probe."""
BUSY_SECONDS = 30.0
"""A deployment without traffic for longer learns nothing from a probe."""
PROBE_SECONDS = 10.0
"""Until a probe has reached the workers and a whole poll of its steps was read."""
LONGEST_TRIAL_SECONDS = 60.0
"""A load that went away leaves a trial without a verdict."""
DOUBT = 0.5
"""Enough for what may be taken back: more likely than not."""
LEAST_LOSS = 0.02
"""Relative loss against plain decoding below which nothing is stopped: it would come back with the next easy answer."""
TRIAL_GAIN = 0.03
"""Least gain of all tasks together that chains must promise to be tried: a trial costs two changes of the plan.
Trees, whose times follow those of no chain, need the least gain of the spec alone."""
HOUR_SECONDS = 3600.0
LOSES = "speculation loses against plain decoding; "


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A row that moved."""

    row: RowMemory
    before: TreeShape
    gain: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """One look at the rows of one load, which stand in the order of the situation's tasks."""

    speculation: SpeculationSpec
    kept: Kept
    situation: Situation
    rows: tuple[RowMemory, ...]
    now: float
    held: bool
    """The guards of all workers run plainly here."""
    here: bool
    """This is the present load."""

    def changes(self) -> list[Change]:
        """The rows that move, and why. A probe that was not measured yet stands."""
        rows = [row for row in self.rows if not row.probing or self._probed(row)]
        if not rows or not self.situation.times.visited(self.situation.load, self.situation.context):
            return []  # nobody has been at this load: what other loads cost is no reason to move
        if any(row.trial for row in rows):
            return self._stopped(rows) or self._tried(rows)
        return self._stopped(rows) or self._improved(rows) or self._trials(rows) or self._probes(rows)

    @property
    def shapes(self) -> Shapes:
        return tuple((row.task, row.shape) for row in self.rows)

    # --- speculation that loses ---------------------------------------------------------------------------------

    def _stopped(self, rows: list[RowMemory]) -> list[Change]:
        """Speculation that loses stops at once, where plain decoding is allowed: of all tasks, else of one."""
        least = {task.name: task.bounds.least for task in self.situation.tasks}
        drafting = [row for row in rows if row.depth and not least[row.task]]
        groups = [drafting, *([row] for row in drafting if len(drafting) > 1)]
        return next((found for group in groups if group and (found := self._stop(group))), [])

    def _stop(self, group: list[RowMemory]) -> list[Change]:
        """A probe at first doubt, and so what is held back by the guards: they have measured it, and hold back what
        there is to learn from."""
        options, around = self._options(group)
        plain = around.plain()
        doubt = self.held or all(row.probing for row in group)
        asked = 1 / self.situation.promise.min_speedup - 1
        if options.confidence(self.shapes, plain, asked + LEAST_LOSS) < (DOUBT if doubt else CERTAINTY):
            return []
        standard = options.by_shapes[plain].rank
        winners = [one for one, option in options.by_shapes.items() if _with_drafts(one) and option.rank < standard]
        best = options.surest(self.shapes, 0.0, filter(self._fast_enough(options, plain), winners), CERTAINTY)
        if best:
            return self._to(group, best, options, LOSES)
        return [self._patient(change) for change in self._to(group, plain, options, LOSES)]

    def _patient(self, change: Change) -> Change:
        """Off until patience is over; it doubles when speculation came back in vain."""
        row = change.row
        if row.depth:
            return change
        before = next(other for other in self.rows if other.task == row.task)
        patience = max(float(self.speculation.hysteresis.min_dwell_seconds), 1.0)
        if before.patience and self.now - before.since < 4 * before.patience:
            patience = min(LONGEST_PATIENCE_SECONDS, 2 * before.patience)
        waiting = row.model_copy(update={"patience": patience, "off_until": self.now + patience})
        return replace(change, row=waiting)

    # --- a gain -------------------------------------------------------------------------------------------------

    def _improved(self, rows: list[RowMemory]) -> list[Change]:
        group = [row for row in rows if self._may_move(row)]
        if not group:
            return []
        options, around = self._options(group)
        least = self.speculation.hysteresis.min_gain_percent / 100
        among = filter(self._fast_enough(options, around.plain()), options.within_timed())
        best = options.surest(self.shapes, least, among, CERTAINTY)
        if best is None:
            return []
        back = not _with_drafts(self.shapes) and not options.by_shapes[best].seconds.steps
        if back and not self.here:
            return []
        return self._on_trial(group, best, options) if back else self._gained(group, best, options, "")

    def _gained(self, group: list[RowMemory], best: Shapes, options: Options, why: str) -> list[Change]:
        return [self._counted(change) for change in self._to(group, best, options, why)]

    def _on_trial(self, group: list[RowMemory], best: Shapes, options: Options) -> list[Change]:
        found = self._gained(group, best, options, "a trial of what was never timed; ")
        return [replace(one, row=one.row.model_copy(update={"trial": True})) for one in found]

    def _may_move(self, row: RowMemory) -> bool:
        hysteresis = self.speculation.hysteresis
        rested = self.now - row.since >= hysteresis.min_dwell_seconds and (row.depth or self.now >= row.off_until)
        return bool(rested) and len(self._moves(row)) < hysteresis.max_changes_per_hour

    def _moves(self, row: RowMemory) -> tuple[float, ...]:
        return tuple(at for at in row.moves if self.now - at < HOUR_SECONDS)

    def _counted(self, change: Change) -> Change:
        moves = (*self._moves(change.row), self.now)
        return replace(change, row=change.row.model_copy(update={"moves": moves}))

    # --- a trial ------------------------------------------------------------------------------------------------

    def _trials(self, rows: list[RowMemory]) -> list[Change]:
        """Workers that explore time chains of other depths by themselves, in bursts. What else promises a gain, and was
        never timed at this load, can be known only by running it: trees, and other depths for other tasks."""
        group = [row for row in rows if self._may_move(row)]
        if not group or not self.here or self.now - self.kept.load.at > BUSY_SECONDS:
            return []
        options, around = self._options(group)
        least = self.speculation.hysteresis.min_gain_percent / 100
        bursts = self.speculation.explore_percent > 0
        untimed = [one for one, found in options.by_shapes.items() if not found.seconds.steps]
        unknown = [one for one in untimed if not (bursts and _alike(one))]
        among = filter(self._fast_enough(options, around.plain()), unknown)
        promising = [one for one in among if _has_tree(one) or options.gain(self.shapes, one) >= TRIAL_GAIN]
        best = options.surest(self.shapes, least, promising, DOUBT)
        return [] if best is None else self._on_trial(group, best, options)

    def _tried(self, rows: list[RowMemory]) -> list[Change]:
        """Once the shapes on trial were timed, what was timed and is better takes their place at once; else they
        stay."""
        since = max(row.since for row in rows if row.trial)
        options, _ = self._options(rows)
        timed = options.by_shapes[self.shapes].seconds
        if (not timed.steps or timed.at - since <= PROBE_SECONDS) and self.now - since < LONGEST_TRIAL_SECONDS:
            return []
        known = [one for one, found in options.by_shapes.items() if found.seconds.steps]
        best = options.surest(self.shapes, 0.0, known, DOUBT)
        moved = {} if best is None else {one.row.task: one for one in self._to(rows, best, options, "after a trial; ")}
        over = (row.model_copy(update={"trial": False}) for row in rows)
        return [moved.get(row.task) or Change(row=row, before=row.shape, gain=None, reason="") for row in over]

    # --- a probe ------------------------------------------------------------------------------------------------

    def _probes(self, rows: list[RowMemory]) -> list[Change]:
        """Speculation that was stopped and about which nothing new is known is tried again once patience is over."""
        group = [row for row in rows if not row.depth and row.patience and self.now >= row.off_until]
        idle = self.now - self.kept.load.at > BUSY_SECONDS
        fresh = any(cell.draft_passes and self.now - cell.at < FRESH_SECONDS for cell in self.kept.costs)
        if not self.here or not group or idle or fresh:
            return []
        row = next((row for row in group if row.task == OTHER_TASK), group[0])
        options, _ = self._options([row])
        deeper = [one for one, option in options.by_shapes.items() if option.shape(row.task).nodes]
        if not deeper:
            return []
        best = min(deeper, key=lambda one: options.by_shapes[one].rank)
        why = f"a probe after {self.now - row.since:.0f} s of plain decoding; "
        found = self._to([row], best, options, why)
        return [replace(one, row=one.row.model_copy(update={"probing": True})) for one in found]

    def _probed(self, row: RowMemory) -> bool:
        """Whether the shapes that a probe runs were timed since it began. Beside other tasks the steps are as deep as
        the deepest of them."""
        alone = len(self.rows) == 1
        return any(
            (cell.draft_passes == row.depth if alone else cell.draft_passes >= row.depth)
            and cell.at - row.since > PROBE_SECONDS
            for cell in self.kept.costs
        )

    # --- common to all ------------------------------------------------------------------------------------------

    def _options(self, group: list[RowMemory]) -> tuple[Options, Situation]:
        """What the rows of ``group`` may run, together and each for itself, while the others stay."""
        now = dict(self.shapes)
        around = self.situation.with_only([row.task for row in group], now)
        best = list(around.best())
        alone = [self._with(row.task, dict(shapes)[row.task]) for shapes in best for row in group if len(group) > 1]
        return weigh(around, [self.shapes, around.plain(), *best, *alone]), around

    def _with(self, task: str, shape: TreeShape) -> Shapes:
        return tuple((name, shape if name == task else old) for name, old in self.shapes)

    def _fast_enough(self, options: Options, plain: Shapes) -> _FastEnough:
        most = options.by_shapes[plain].per_token / self.situation.promise.min_speedup
        return _FastEnough(options, most)

    def _to(self, group: Iterable[RowMemory], shapes: Shapes, options: Options, why: str) -> list[Change]:
        after = dict(shapes)
        price = options.price(shapes)
        gain = options.gain(self.shapes, shapes)
        changes = []
        for row in group:
            if after[row.task] != row.shape:
                moved = row.running(after[row.task], since=self.now, probing=False, trial=False, price=round(price, 4))
                reason = why + self._reason(row.task, shapes, options)
                changes.append(Change(row=moved, before=row.shape, gain=gain, reason=reason))
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
class _FastEnough:
    """Whether shapes keep the least speedup; plain decoding always does."""

    options: Options
    most_per_token: float

    def __call__(self, shapes: Shapes) -> bool:
        ours = self.options.by_shapes[shapes].per_token
        return not _with_drafts(shapes) or ours <= self.most_per_token * (1 + 1e-9) or self._not_asked

    @property
    def _not_asked(self) -> bool:
        return self.options.situation.promise.min_speedup <= 1


def _alike(shapes: Shapes) -> bool:
    """One chain for all tasks."""
    return len({shape for _, shape in shapes}) == 1 and shapes[0][1].is_chain


def _has_tree(shapes: Shapes) -> bool:
    return any(shape.nodes and not shape.is_chain for _, shape in shapes)


def _with_drafts(shapes: Shapes) -> bool:
    return any(shape.nodes for _, shape in shapes)
