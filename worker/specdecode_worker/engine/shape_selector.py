"""Picks every decoding request's tree for the next step: the plan's row, the guard's veto, and what exploration asks.

Reads no clock: what steps took is told to `measured`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdecode_worker.contract import GuardCell, Plan, PlanState, TreeShape
from specdecode_worker.engine.request import Request
from specdecode_worker.speculation.dispatch import Dispatcher, Load
from specdecode_worker.speculation.exploration import DROPPED_STEPS, Exploration
from specdecode_worker.speculation.guard import Guard
from specdecode_worker.speculation.plain_step_times import PlainCurve
from specdecode_worker.speculation.trees import PLAIN, Tree, tree_of

_PLAIN_SHAPE = TreeShape(())


@dataclass(frozen=True, slots=True)
class Choice:
    """What was picked for a step of ``sequences`` decoding requests. ``context`` is the bucket of the longest of them;
    ``shape`` is set when all of them run the same; ``explores``: in a burst, or while the guard probes; ``counted`` is
    False for the warming steps of a burst; ``shadow_passes`` are draft passes beyond the shape."""

    sequences: int = 0
    concurrency: int = 0
    context: int = 0
    shape: TreeShape | None = None
    explores: bool = False
    counted: bool = True
    shadow_passes: int = 0


def planned_shapes(plan: Plan, concurrency: int, context: int) -> set[TreeShape]:
    """What the tasks of a load run by the plan."""
    rows = {row.shape for row in plan.rows if (row.concurrency, row.context) == (concurrency, context)}
    return rows or {plan.initial}


class Drafts(Protocol):
    """What is loaded; a Roster. False when nothing is."""

    def __bool__(self) -> bool: ...

    def ready(self, request: Request) -> bool:
        """Whether a draft can propose for this request in the next step."""
        ...


class Pilot:
    """One per engine. Without a draft everything is plain."""

    def __init__(self, dispatcher: Dispatcher, drafts: Drafts) -> None:
        self.choice = Choice()
        self.only: TreeShape | None = None
        """Everything runs this, whatever the plan says: while step times are calibrated."""
        self._dispatcher, self._drafts = dispatcher, drafts
        self._guard = Guard()
        self._exploration = Exploration()
        self._curve = PlainCurve()

    @property
    def plan(self) -> Plan:
        return self._dispatcher.plan

    @property
    def plan_state(self) -> PlanState:
        return self._dispatcher.state

    @property
    def drafts_prompts(self) -> bool:
        """Whether the draft follows along at all: when the plan may come to draft."""
        return bool(self._drafts) and (self.plan.max_depth > 0 or self.plan.initial.nodes > 0 or bool(self.plan.rows))

    def guard_cells(self) -> tuple[GuardCell, ...]:
        return self._guard.cells()

    def assume_plain(self, sequences: int, seconds: float) -> None:
        """What a plain step of so many sequences was measured to take before anybody was served."""
        self._curve.learn(sequences, seconds)
        bucket = bisect_left(self.plan.buckets.concurrency, sequences)
        self._guard.assume(bucket, 0, self._curve.scaled(seconds, sequences, self._edge(bucket)))

    def take_plan(self, plan: Plan) -> None:
        """Raises PlanRefused. The guard forgets what it held against shapes that the plan no longer runs."""
        before = self.plan
        self._dispatcher.take(plan)
        if plan.buckets != before.buckets:
            self._guard = Guard()
        self._guard.keep(lambda cell, shape: shape in planned_shapes(plan, *cell))

    def draft_changed(self, first_hash: str) -> None:
        """Another draft runs: rows that were planned for the first one stand if it is still that, and no verdict
        of the guard does."""
        self._dispatcher.draft_hash = first_hash
        self._guard = Guard()

    def trees(self, requests: Sequence[Request]) -> list[Tree]:
        """Trees of the decoding requests, in order; remembers the choice for `measured`. All of them read the rows of
        the longest context: a step is as long as the batch makes it, and costs are known by that."""
        concurrency = self._dispatcher.load(len(requests))
        context = self._dispatcher.context(max(request.cached_bound for request in requests))
        if not self._drafts or self.only is not None:
            only = self.only if self._drafts and self.only is not None else _PLAIN_SHAPE
            self.choice = Choice(len(requests), concurrency, context, only)
            tree = tree_of(only, 0)
            return [tree if only.nodes and self._drafts.ready(request) else PLAIN for request in requests]
        # Requests of one task run alike; a large batch is looked through once.
        tasks = [request.submit.task for request in requests]
        shapes = {task: self._shape(Load(concurrency, context, task)) for task in set(tasks)}
        first, planned = shapes[tasks[0]], self._dispatcher.shape(Load(concurrency, context, tasks[0]))
        burst = self._exploration.burst_for(concurrency, first, planned, self.plan.max_depth, self.plan.explore)
        counted = True
        if burst is not None and self.plan.max_depth:
            burst.done += 1
            counted = burst.done > DROPPED_STEPS
            shapes = dict.fromkeys(shapes, burst.shape)
        shadow = self._shadow_depth() if burst is None else 0
        tree_by_task = {task: tree_of(shape, shadow) for task, shape in shapes.items()}
        ready = [self._drafts.ready(request) for request in requests]
        trees = [tree_by_task[task] if can else PLAIN for task, can in zip(tasks, ready, strict=True)]
        passes = max(tree.drafted_depth for tree in trees) - max(tree.depth for tree in trees)
        # A batch of which some could not be drafted for says nothing about the shape that it should have run.
        shape = shapes[tasks[0]]
        alike = len(set(shapes.values())) == 1 and (all(ready) or not shape.nodes)
        explores = burst is not None or self._probes(concurrency, context, shapes.values())
        self.choice = Choice(len(requests), concurrency, context, shape if alike else None, explores, counted, passes)
        return trees

    def measured(self, choice: Choice, seconds: float, tokens: float, shadow_seconds: float) -> None:
        """A step of decoding alone took ``seconds``, ``shadow_seconds`` of them for shadow passes, and brought
        ``tokens`` per sequence. Nothing is learnt of traffic from steps that ran by order."""
        if self.only is not None:
            return
        edge = self._edge(choice.concurrency)
        full, shadow = (self._curve.scaled(part, choice.sequences, edge) for part in (seconds, shadow_seconds))
        self._exploration.passed(choice.concurrency, full, tokens, explores=choice.explores, shadow_seconds=shadow)
        if choice.shape is not None and choice.counted:
            self._guard.measured(choice.concurrency, choice.context, choice.shape, full - shadow, tokens)

    def _edge(self, bucket: int) -> int:
        """Sequences that the steps of a bucket are told as; behind the last edge there is none but it."""
        edges = self.plan.buckets.concurrency
        return edges[min(bucket, len(edges) - 1)] if edges else 1

    def _shape(self, load: Load) -> TreeShape:
        shape = self._dispatcher.shape(load)
        stopped = self.plan.guard and not self._guard.allows(load.concurrency, load.context, shape)
        return _PLAIN_SHAPE if stopped else shape

    def _probes(self, concurrency: int, context: int, shapes: Iterable[TreeShape]) -> bool:
        return self.plan.guard and any(self._guard.probes(concurrency, context, shape) for shape in shapes)

    def _shadow_depth(self) -> int:
        return self.plan.max_depth if self._exploration.shadows(self.plan.explore) else 0
