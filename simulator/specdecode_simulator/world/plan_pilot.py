"""A worker's choice of shapes under a plan, by the worker's own dispatcher, guard and exploration.

The engine chooses shapes for each step; the simulator chooses them for a segment of equal steps. A segment therefore
ends before the guard can decide anything, a burst is one segment, and steps with shadow passes come in batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from specdecode_simulator.records.acceptance_walks import MOST_STEPS, PLAIN, Form, form_of
from specdecode_simulator.world.guard_schedule import steps_until_decision
from specdecode_simulator.world.segment import Group, Load, Outcome, Segment
from specdecode_worker.contract import Plan, PlanState
from specdecode_worker.control.plan import (
    BURST_STEPS,
    DROPPED_STEPS,
    Dispatcher,
    Exploration,
    Guard,
    PlainStepTimes,
    PlanRefused,
    changed_loads,
)
from specdecode_worker.control.plan import Load as PlanLoad

SEGMENT_STEPS = 48
"""Most steps of a segment that follows the plan."""
SHADOW_STEPS = 8
"""Most steps in a batch with shadow passes, and fewest without between two batches. The engine drafts shadow nodes in
every other step at most.
"""


class PlanPilot:
    """Shapes of one worker. ``labels`` are the task names by index; ``draft_hash`` is that of the loaded draft."""

    def __init__(
        self, labels: tuple[str, ...], plan: Plan, step_seconds: Callable[[int, int], float], draft_hash: str = ""
    ) -> None:
        """Start with ``plan``.

        ``step_seconds`` returns the seconds of a step that verifies no draft, by its sequences and draft passes.
        """
        self.labels = labels
        self.guard, self.exploration = Guard(), Exploration()
        self._dispatcher = Dispatcher("", draft_hash, plan)
        self._step_seconds = step_seconds
        self._plain_times = PlainStepTimes()
        self._bucket = 0
        self._since_shadow = SHADOW_STEPS
        self._forms: dict[tuple[int, int, int], Form] = {}

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        return self._dispatcher.plan

    @property
    def state(self) -> PlanState:
        """State of the plan for the report."""
        return self._dispatcher.state

    def calibration(self, most: int) -> Iterator[tuple[int, Form]]:
        """Return (sequences, shape) of the steps that the engine times before it serves: plain ones, the plan's."""
        for count in self._loads(most):
            yield count, PLAIN
            yield from ((count, form_of(shape.parents)) for shape in self.plan.timed_shapes)

    def calibrate(self, most: int) -> None:
        """Learn the times of plain steps before the first request, at the loads of the plan up to ``most``."""
        for count in self._loads(most):
            seconds = self._step_seconds(count, 0)
            self._plain_times.learn(count, seconds)
            bucket = bisect_left(self.plan.buckets.concurrency, count)
            self.guard.assume(bucket, 0, seconds * self._full_bucket_factor(count, bucket))

    def take(self, plan: Plan) -> None:
        """Apply a plan. An older one is refused without an error; the next report shows the version in force."""
        before = self.plan
        try:
            self._dispatcher.set_plan(plan)
        except PlanRefused:
            return
        if plan.buckets != before.buckets:
            self.guard = Guard()
        self.exploration.restart(changed_loads(before, plan))
        self._forms = {}
        planned: dict[tuple[int, int], set[object]] = {}
        for row in plan.rows:
            planned.setdefault((row.concurrency, row.context), set()).add(row.shape)
        self.guard.retain_planned(lambda cell, shape: shape in planned.get(cell, {plan.initial}))

    def next(self, load: Load) -> Segment:
        """Choose the shapes of the next steps, and how many steps run them."""
        self._bucket = concurrency = self._dispatcher.load(load.sequences)
        context = load.context
        planned = {group: self._planned_form(concurrency, context, group.label) for group in load.groups}
        allowed = {group: self._allowed_form(concurrency, context, form) for group, form in planned.items()}
        forms = planned if any(form.shape.nodes for form in allowed.values()) else allowed  # as the worker does
        if load.prefill:
            return Segment(forms)
        first = next(iter(forms))
        share, most = self.plan.explore, self.plan.max_depth
        burst = self.exploration.burst_for(concurrency, forms[first].shape, planned[first].shape, most, share)
        if burst is not None:
            burst.done = BURST_STEPS
            burst_forms = dict.fromkeys(forms, form_of(burst.shape.parents))
            return Segment(burst_forms, BURST_STEPS, in_burst=True, dropped=DROPPED_STEPS)
        steps = MOST_STEPS
        if self.plan.guard:
            steps = steps_until_decision(self.guard.states_at(concurrency, context), MOST_STEPS)
        shadow_steps = self._shadow_steps(load, forms)
        if shadow_steps:
            return Segment(forms, min(shadow_steps, steps), drafted_depth=most, shadow=True)
        return Segment(forms, min(steps, SEGMENT_STEPS))

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        """Pass a segment without prefill to the guard and to exploration."""
        if outcome.prefill or outcome.emitted <= 0:
            return
        tokens = outcome.emitted / max(outcome.sequences, 1e-9)
        context = load.context
        extra = 0.0
        if segment.shadow:
            extra = outcome.steps * self._shadow_seconds(load, segment.forms.values(), segment.drafted_depth)
            self._since_shadow = 0
        else:
            self._since_shadow += outcome.steps
        factor = self._full_bucket_factor(outcome.sequences, self._bucket)
        seconds, shadow = factor * outcome.seconds, factor * extra
        explores = segment.in_burst or (
            self.plan.guard
            and any(self.guard.is_probe(self._bucket, context, form.shape) for form in segment.forms.values())
        )
        same = {form.shape for form in segment.forms.values()}
        shape = same.pop() if len(same) == 1 else None
        self.exploration.passed(
            self._bucket, seconds, tokens, explores=explores, shape=shape, shadow_seconds=shadow, steps=outcome.steps
        )
        if shape is not None:
            self.guard.record_step(self._bucket, context, shape, seconds - shadow, tokens, outcome.steps)

    def _loads(self, most: int) -> list[int]:
        """Return the numbers of sequences that are timed at start: the bucket edges up to ``most``, and ``most``."""
        return sorted({*(edge for edge in self.plan.buckets.concurrency if edge <= most), most})

    def _shadow_steps(self, load: Load, forms: dict[Group, Form]) -> int:
        """Return the number of steps with shadow passes that are due and affordable, 0 for none."""
        share, most = self.plan.explore, self.plan.max_depth
        budget = self.exploration.shadow
        deeper = most > max(form.depth for form in forms.values())
        due = deeper and self._since_shadow >= SHADOW_STEPS
        if not (due and budget.affords(share / 2, self.exploration.counted_seconds)):
            return 0
        room = share / 2 * self.exploration.counted_seconds - budget.spent_seconds
        extra = self._shadow_seconds(load, forms.values(), most)
        return 1 + int(min(room / max(extra, 1e-9), SHADOW_STEPS - 1))

    def _shadow_seconds(self, load: Load, forms: Iterable[Form], drafted_depth: int) -> float:
        """Return the seconds that shadow passes add to one step."""
        deepest = max(form.depth for form in forms)
        return self._step_seconds(load.sequences, drafted_depth) - self._step_seconds(load.sequences, deepest)

    def _full_bucket_factor(self, sequences: float, bucket: int) -> float:
        """Return the time of a plain step at the bucket's upper edge over that of a step of ``sequences``."""
        edges = self.plan.buckets.concurrency
        return self._plain_times.scaled(1.0, sequences, edges[min(bucket, len(edges) - 1)]) if edges else 1.0

    def _allowed_form(self, concurrency: int, context: int, form: Form) -> Form:
        """Return the form, or plain decoding if the guard stopped it."""
        stopped = self.plan.guard and not self.guard.allows(concurrency, context, form.shape)
        return PLAIN if stopped else form

    def _planned_form(self, concurrency: int, context: int, label: int) -> Form:
        """Return the planned form for a load and a task."""
        key = (concurrency, context, label)
        form = self._forms.get(key)
        if form is None:
            shape = self._dispatcher.shape(PlanLoad(concurrency, context, self.labels[label]))
            form = self._forms[key] = form_of(shape.parents)
        return form
