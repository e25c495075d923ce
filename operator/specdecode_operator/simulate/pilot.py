"""The worker's own half of the loop, modelled: plan rows with bucket hysteresis, guard, shadows, bursts.

The rules are those of specdecode_worker's dispatch, guard, exploration and pilot, which the operator may not import;
tests hold this model against them step by step. Here steps come in segments, so decaying sums move by many at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specdecode_operator.simulate.guard import Cell, Guard, Pace
from specdecode_operator.simulate.segment import Load, Outcome, Segment
from specdecode_operator.simulate.walks import MOST_STEPS, PLAIN, Form, chain, form_of
from specdecode_worker.contract import OTHER_TASK, Plan, PlanState

BURST_STEPS, DROPPED_STEPS = 16, 2
EXPECTED_LOSS = 0.5
SEGMENT_STEPS = 48
SHADOW_STEPS = 8
"""Steps with a shadow come in batches of at most this many; the worker has every other step at most."""


@dataclass(slots=True)
class Exploration:
    """Half of the share for shadow passes, half for bursts, both held against all seconds."""

    shadow_spent: float = 0.0
    burst_spent: float = 0.0
    total: float = 0.0
    since_burst: int = BURST_STEPS
    since_shadow: int = SHADOW_STEPS
    usual: dict[int, Pace] = field(default_factory=dict)
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def burst(self, concurrency: int, running: int, planned: int, most: int, share: float) -> int | None:
        """Depth of a burst that is due: the one timed least of plain, the neighbours, the deepest and the planned."""
        known = self.usual.get(concurrency)
        if most == 0 or self.since_burst < BURST_STEPS or known is None or known.pace is None:
            return None
        if self.burst_spent + EXPECTED_LOSS * BURST_STEPS * known.pace >= share / 2 * self.total:
            return None
        near = (0, running - 1, running + 1, planned, most)
        depths = sorted({min(max(depth, 0), most) for depth in near} - {running})
        if not depths:
            return None
        depth = min(depths, key=lambda depth: self.counts[concurrency, depth])
        self.counts[concurrency, depth] += 1
        self.since_burst = 0
        return depth

    def shadows(self, share: float) -> bool:
        return self.since_shadow >= SHADOW_STEPS and self.shadow_spent < share / 2 * self.total

    def passed(
        self, concurrency: int, steps: int, seconds: float, tokens: float, *, explores: bool, shadow: float = 0.0
    ) -> None:
        """``shadow``: seconds for shadow passes, which here cost nothing else."""
        self.total += seconds
        self.shadow_spent += shadow
        usual = self.usual.setdefault(concurrency, Pace())
        if not explores:
            self.since_burst += steps
            usual.add(steps, seconds - shadow, tokens)
        elif usual.pace is not None:
            self.burst_spent += max(0.0, seconds - tokens * usual.pace)


class PlanPilot:
    """Runs a plan as a worker does. ``labels`` are the task names by index."""

    def __init__(self, labels: tuple[str, ...], plan: Plan, pass_seconds: Callable[[int], float]) -> None:
        self.labels, self.plan = labels, plan
        self.guard, self.exploration = Guard(), Exploration()
        self._pass_seconds = pass_seconds
        self._plain: list[tuple[int, float]] = []
        self._bucket = 0
        self._forms: dict[tuple[int, int, int], Form] = {}
        self._planned: dict[Cell, set[Form]] = {}
        self._index()

    @property
    def state(self) -> PlanState:
        plan = self.plan
        return PlanState(uid=plan.uid, version=plan.version, draft=plan.draft, buckets=plan.buckets)

    def calibration(self, most: int) -> Iterator[tuple[int, int]]:
        """(sequences, depth) of what the engine times before it serves: plain steps, and the shallowest and deepest
        chain, at the loads of the plan."""
        deepest = self.plan.max_depth
        depths = {0, 1, deepest} if deepest and self.plan.explore else {0}
        for count in self._loads(most):
            yield from ((count, depth) for depth in sorted(depths))

    def calibrate(self, plain_seconds: Callable[[int], float], most: int) -> None:
        """What plain steps took before it served, with next to no context."""
        for count in self._loads(most):
            seconds = plain_seconds(count)
            self._plain.append((count, seconds))
            bucket = bisect_left(self.plan.buckets.concurrency, count)
            self.guard.assume((bucket, 0), seconds * self._full(count, bucket))

    def _loads(self, most: int) -> list[int]:
        return sorted({*(edge for edge in self.plan.buckets.concurrency if edge <= most), most})

    def take(self, plan: Plan) -> None:
        """A newer plan; an older one is refused in silence, as the next report shows."""
        if plan.version < self.plan.version:
            return
        if plan.buckets != self.plan.buckets:
            self.guard = Guard()
        self.plan = plan
        self._bucket = min(self._bucket, len(plan.buckets.concurrency))
        self._index()
        initial = {form_of(plan.initial.parents)}
        self.guard.keep(lambda cell, form: form in self._planned.get(cell, initial))

    def context(self, tokens: float) -> int:
        return bisect_left(self.plan.buckets.context, tokens)

    def next(self, load: Load) -> Segment:
        concurrency, context = self._concurrency(load.sequences), load.context
        planned = {group: self._planned_form(concurrency, context, group.label) for group in load.groups}
        forms = {
            group: form if self._allowed((concurrency, context), form) else PLAIN for group, form in planned.items()
        }
        most, share = self.plan.max_depth, self.plan.explore
        if load.prefill:
            return Segment(forms)
        first = next(iter(forms))
        depth = self.exploration.burst(concurrency, forms[first].depth, planned[first].depth, most, share)
        if depth is not None:
            return Segment(dict.fromkeys(forms, chain(depth)), BURST_STEPS, in_burst=True, dropped=DROPPED_STEPS)
        steps = self.guard.until_verdict((concurrency, context)) if self.plan.guard else MOST_STEPS
        deepest = max(form.depth for form in forms.values())
        if most > deepest and self.exploration.shadows(share):
            room = share / 2 * self.exploration.total - self.exploration.shadow_spent
            extra = (most - deepest) * self._pass_seconds(load.sequences)
            count = 1 + int(min(room / max(extra, 1e-9), SHADOW_STEPS - 1))
            return Segment(forms, min(count, steps), drafted_depth=most, shadow=True)
        return Segment(forms, min(steps, SEGMENT_STEPS))

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        if outcome.prefill or outcome.emitted <= 0:
            return
        tokens = outcome.emitted / max(outcome.sequences, 1e-9)
        cell = (self._bucket, load.context)
        extra = 0.0
        if segment.shadow:
            deepest = max(form.depth for form in segment.forms.values())
            extra = outcome.steps * (segment.drafted_depth - deepest) * self._pass_seconds(load.sequences)
            self.exploration.since_shadow = 0
        else:
            self.exploration.since_shadow += outcome.steps
        full = self._full(outcome.sequences, self._bucket)
        seconds, shadow = full * outcome.seconds, full * extra
        explores = segment.in_burst or (
            self.plan.guard and any(self.guard.probes(cell, form) for form in segment.forms.values())
        )
        self.exploration.passed(self._bucket, outcome.steps, seconds, tokens, explores=explores, shadow=shadow)
        same = set(segment.forms.values())
        if len(same) == 1:
            self.guard.measured(cell, same.pop(), outcome.steps, seconds - shadow, tokens)

    def _full(self, sequences: float, bucket: int) -> float:
        """Factor on a step of ``sequences`` to what it would take at the bucket's edge, as plain steps do."""
        edges, points = self.plan.buckets.concurrency, self._plain
        if len(points) < 2 or not edges:
            return 1.0
        before, after = (_line_through(points, at) for at in (sequences, edges[min(bucket, len(edges) - 1)]))
        return after / before if before > 0 and after > 0 else 1.0

    def _allowed(self, cell: Cell, form: Form) -> bool:
        return not self.plan.guard or self.guard.allows(cell, form)

    def _concurrency(self, running: int) -> int:
        """Up when an edge is exceeded by the hysteresis, down as soon as the load is at or below the edge."""
        buckets = self.plan.buckets
        exact = bisect_left(buckets.concurrency, running)
        if exact > self._bucket:
            entered = sum(running > edge * (1 + buckets.hysteresis) for edge in buckets.concurrency)
            exact = max(self._bucket, entered)
        self._bucket = exact
        return exact

    def _planned_form(self, concurrency: int, context: int, label: int) -> Form:
        key = (concurrency, context, label)
        found = self._forms.get(key)
        if found is None:
            row = self.plan.row(concurrency, context, self.labels[label])
            found = self._forms[key] = form_of((row.shape if row else self.plan.initial).parents)
        return found

    def _index(self) -> None:
        self._forms, self._planned = {}, {}
        for row in self.plan.rows:
            self._planned.setdefault((row.concurrency, row.context), set()).add(form_of(row.shape.parents))


def _line_through(points: list[tuple[int, float]], at: float) -> float:
    """Affine between rising points, and beyond them."""
    right = min(max(bisect_left(points, (at, 0.0)), 1), len(points) - 1)
    (low, least), (high, most) = points[right - 1 : right + 1]
    return least + (most - least) * (at - low) / (high - low)


def label_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Task names by label index; the last is where everything unnamed goes."""
    return (*names, OTHER_TASK)
