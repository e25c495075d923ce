"""Rows of a step and the tree shape of each, by the plan, exploration and the guard."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specdecode_worker.contract import GuardCell, Plan, PlanState, TreeShape
from specdecode_worker.control.guard import Guard
from specdecode_worker.control.plan import DROPPED_STEPS, Dispatcher, Exploration, Load, PlainStepTimes, changed_loads
from specdecode_worker.core.request import Request
from specdecode_worker.sampling.trees import PLAIN, Tree, extended, given_chain, tree_of

# Selection of the draft tree of every decoding request from the plan, the guard and exploration.
#
# This module reads no clock: its caller passes measured step times to ``ShapeSelector.record_step``.

_PLAIN_SHAPE = TreeShape(())


@dataclass(frozen=True, slots=True)
class Choice:
    """Shapes selected for one step."""

    sequences: int = 0
    """Number of decoding requests."""
    concurrency: int = 0
    """Index of the concurrency bucket."""
    context: int = 0
    """Index of the context bucket of the longest request."""
    shape: TreeShape | None = None
    """Common shape of all requests; None if shapes differ or some request had no draft ready for it."""
    explores: bool = False
    """True if the step belongs to an exploration burst or a probe of the guard."""
    counted: bool = True
    """True if the measured time counts; False for the warm-up steps of a burst."""
    shadow_passes: int = 0
    """Number of draft passes beyond the shape; their tokens are scored but not verified."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Trees of the decoding requests of one step, in their order, and the choice that they follow."""

    trees: Sequence[Tree] = ()
    choice: Choice = Choice()


def planned_shapes(plan: Plan, concurrency: int, context: int) -> set[TreeShape]:
    """Return the shapes that the plan assigns to the tasks of a (concurrency, context) bucket."""
    rows = {row.shape for row in plan.rows if (row.concurrency, row.context) == (concurrency, context)}
    return rows or {plan.initial}


class Drafts(Protocol):
    """Loaded drafts as the selector sees them, implemented by ``DraftRegistry``. False if no draft is loaded."""

    def __bool__(self) -> bool: ...

    @property
    def merges(self) -> bool:
        """True if several drafts may propose for one request."""
        ...

    def ready(self, request: Request) -> bool:
        """Return whether a draft can propose for this request in the next step."""
        ...

    def extension(self, request: Request) -> int:
        """Return the depth to which drafts without passes extend the request's tree, after ``ready``; 0 for none."""
        ...


class ShapeSelector:
    """Shape selector of one engine. Without a draft it selects plain decoding for every request."""

    def __init__(self, dispatcher: Dispatcher, drafts: Drafts) -> None:
        """Start with the plan of ``dispatcher``, an empty guard and no exploration under way."""
        self.forced_shape: TreeShape | None = None
        """Shape forced for all requests while step times are calibrated; None follows the plan."""
        self._dispatcher, self._drafts = dispatcher, drafts
        self._guard = Guard()
        self._exploration = Exploration()
        self._explores = True
        self._curve = PlainStepTimes()

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        return self._dispatcher.plan

    @property
    def plan_state(self) -> PlanState:
        """State of the plan for the report."""
        return self._dispatcher.state

    @property
    def draft_prefill(self) -> bool:
        """True if drafts process prompts: a draft is loaded and the plan can lead to drafting."""
        return bool(self._drafts) and (self.plan.max_depth > 0 or self.plan.initial.nodes > 0 or bool(self.plan.rows))

    def guard_cells(self) -> tuple[GuardCell, ...]:
        """Return the guard's state per load for the report."""
        return self._guard.cells()

    def set_plain_step_time(self, sequences: int, seconds: float) -> None:
        """Store the time in seconds of a plain step of ``sequences`` requests, measured before the first request."""
        self._curve.learn(sequences, seconds)
        bucket = bisect_left(self.plan.buckets.concurrency, sequences)
        self._guard.assume(bucket, 0, self._curve.scaled(seconds, sequences, self._edge(bucket)))

    def take_plan(self, plan: Plan) -> None:
        """Apply a plan. The guard drops its evidence on shapes that the plan no longer contains.

        Raises:
            PlanRefused: The plan is for another deployment or older than the current one.
        """
        before = self.plan
        self._dispatcher.set_plan(plan)
        if plan.buckets != before.buckets:
            self._guard = Guard()
        self._exploration.restart(changed_loads(before, plan))
        self._guard.retain_planned(lambda cell, shape: shape in planned_shapes(plan, *cell))

    def set_draft_hash(self, first_hash: str) -> None:
        """Handle a change of drafts: reset the guard and set the hash that the plan's rows are matched against.

        The guard keeps its times of plain steps, which do not depend on the draft.

        Args:
            first_hash: Hash of the first draft. Plan rows apply only if they were planned for it.
        """
        self._dispatcher.draft_hash = first_hash
        self._guard = self._guard.without_shapes()
        self._exploration.restart()

    def set_trial(self, *, active: bool) -> None:
        """Begin or end a draft trial.

        During it the rows of the plan apply to any draft, and nothing is explored: bursts and shadow passes take time,
        and could fall into the blocks of one draft more often than into those of the other.
        """
        self._dispatcher.accepts_any_draft = active
        self._explores = not active

    def select(self, requests: Sequence[Request]) -> Selection:
        """Return the trees of the decoding requests, at least one, and the choice that they follow.

        All requests use the plan rows of the longest context in the batch, because step times are recorded by the
        longest context.
        """
        concurrency = self._dispatcher.load(len(requests))
        context = self._dispatcher.context(max(request.cached_bound for request in requests))
        if not self._drafts or self.forced_shape is not None:
            forced_shape = self.forced_shape if self._drafts and self.forced_shape is not None else _PLAIN_SHAPE
            tree = tree_of(forced_shape, 0)
            trees = [tree if forced_shape.nodes and self._drafts.ready(request) else PLAIN for request in requests]
            return Selection(trees, Choice(len(requests), concurrency, context, forced_shape))
        # Requests of one task share a shape, so the shape is looked up once per task and not once per request.
        tasks = [request.submit.task for request in requests]
        planned = {task: self._dispatcher.shape(Load(concurrency, context, task)) for task in set(tasks)}
        shapes = {task: self._allowed(concurrency, context, shape) for task, shape in planned.items()}
        first, max_depth = tasks[0], self.plan.max_depth if self._explores else 0
        burst = self._exploration.burst_for(concurrency, shapes[first], planned[first], max_depth, self.plan.explore)
        counted = True
        if burst is not None and max_depth:
            burst.done += 1
            counted = burst.done > DROPPED_STEPS
            shapes = dict.fromkeys(shapes, burst.shape)
        shadow = self._shadow_depth() if burst is None and self._explores else 0
        tree_by_task = {task: tree_of(shape, shadow) for task, shape in shapes.items()}
        ready = [self._drafts.ready(request) for request in requests]
        trees = [tree_by_task[task] if can else PLAIN for task, can in zip(tasks, ready, strict=True)]
        if self._drafts.merges and not shadow:
            trees = [self._extended(tree, request) for tree, request in zip(trees, requests, strict=True)]
        different = {id(tree): tree for tree in trees}.values()
        passes = max(tree.drafted_depth for tree in different) - max(tree.depth for tree in different)
        # The time of a step in which some requests had no draft ready is no evidence about the intended shape.
        shape = shapes[first]
        same_shape = len(set(shapes.values())) == 1 and (all(ready) or not shape.nodes)
        explores = burst is not None or self._probes(concurrency, context, shapes.values())
        common_shape = shape if same_shape else None
        choice = Choice(len(requests), concurrency, context, common_shape, explores, counted, passes)
        return Selection(trees, choice)

    def record_step(self, choice: Choice, seconds: float, tokens: float, shadow_seconds: float) -> None:
        """Pass a measured step without prefill to the guard and to exploration.

        Steps with a forced shape (``forced_shape``) are ignored.

        Args:
            choice: Choice that the step ran with.
            seconds: Duration of the step.
            tokens: Emitted tokens per sequence.
            shadow_seconds: Part of ``seconds`` spent on shadow passes.
        """
        if self.forced_shape is not None:
            return
        edge = self._edge(choice.concurrency)
        full, shadow = (self._curve.scaled(part, choice.sequences, edge) for part in (seconds, shadow_seconds))
        if self._explores:  # else the share of a whole trial would be explored at once after it
            self._exploration.passed(
                choice.concurrency, full, tokens, explores=choice.explores, shape=choice.shape, shadow_seconds=shadow
            )
        if choice.shape is not None and choice.counted:
            self._guard.record_step(choice.concurrency, choice.context, choice.shape, full - shadow, tokens)

    def _extended(self, tree: Tree, request: Request) -> Tree:
        """Return the tree of a request, deeper if drafts without passes extend it. Plain decoding stays plain."""
        depth = self._drafts.extension(request) if tree.drafted_depth else 0
        return extended(tree, depth) if depth else tree

    def _edge(self, bucket: int) -> int:
        """Return the number of sequences that step times of a bucket are scaled to: its upper edge.

        The bucket beyond the last edge has no upper edge and uses the last one.
        """
        edges = self.plan.buckets.concurrency
        return edges[min(bucket, len(edges) - 1)] if edges else 1

    def _allowed(self, concurrency: int, context: int, shape: TreeShape) -> TreeShape:
        """Return the planned ``shape`` of a load, or plain decoding if the guard stopped that shape."""
        stopped = self.plan.guard and not self._guard.allows(concurrency, context, shape)
        return _PLAIN_SHAPE if stopped else shape

    def _probes(self, concurrency: int, context: int, shapes: Iterable[TreeShape]) -> bool:
        """Return whether the guard is probing one of the shapes at this load."""
        return self.plan.guard and any(self._guard.is_probe(concurrency, context, shape) for shape in shapes)

    def _shadow_depth(self) -> int:
        """Return the depth to draft for scoring only, 0 if exploration affords no shadow passes now."""
        return self.plan.max_depth if self._exploration.shadows(self.plan.explore) else 0


# Batch of a step: its rows, and the shapes of those that decode.


@dataclass(slots=True)
class Row:
    """Part of one request in a step: ``count`` packed tokens, either a prefill chunk or the nodes of a draft tree.

    A chunk begins at position ``start``, which is -1 for a tree. ``emits`` is False for a chunk that does not end
    its prompt: such a row emits no token. A row is never changed; a frozen class would take 1 us more to create.
    """

    request: Request
    count: int
    tree: Tree = PLAIN
    start: int = -1
    emits: bool = True

    @property
    def is_chunk(self) -> bool:
        """True if the row is a prefill chunk."""
        return self.start >= 0

    @property
    def is_first_chunk(self) -> bool:
        """True if the row is the first chunk since the request was admitted."""
        return self.is_chunk and self.start == self.request.prefix

    @property
    def max_committed(self) -> int:
        """Upper bound of the positions that the step commits to the cache for this row."""
        return self.count if self.start >= 0 else self.tree.depth + 1


def decoding_rows(rows: Sequence[Row]) -> int:
    """Return the number of decoding rows of a batch. Its prefill chunks are behind them."""
    decoding = len(rows)
    while decoding and rows[decoding - 1].is_chunk:
        decoding -= 1
    return decoding


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step and the choice of shapes for its decoding requests; an empty choice if no request decodes."""

    rows: Sequence[Row]
    choice: Choice


# Draft trees of guided requests: chains of tokens that the grammar forces, which need no draft pass.


def with_forced_tokens(selection: Selection, requests: Sequence[Request]) -> Selection:
    """Return ``selection`` with a chain of forced tokens for each guided request that has enough of them.

    A chain replaces a drafted tree that is not deeper: the same tokens then cost no draft pass. A deeper tree stays,
    since its draft proposes forced tokens too. A step with such a chain is no evidence about the planned shape.
    """
    trees = [_tree(tree, request) for tree, request in zip(selection.trees, requests, strict=True)]
    if not any(tree.given for tree in trees):
        return selection
    return Selection(trees, replace(selection.choice, shape=None, shadow_passes=0))


def given_tokens(request: Request, tree: Tree) -> tuple[int, ...]:
    """Return the tokens of a tree with given tokens; empty for any other tree."""
    if not tree.given or request.guide is None:
        return ()
    return request.guide.forced()[: tree.verified - 1]


def _tree(tree: Tree, request: Request) -> Tree:
    guide = request.guide
    if guide is None or not request.submit.sampling.max_tokens - request.emitted > 1:
        return tree
    room = request.submit.sampling.max_tokens - request.emitted - 1
    forced = len(guide.forced()[:room])
    return given_chain(forced) if forced and forced >= tree.depth else tree
