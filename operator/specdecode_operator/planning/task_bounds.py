"""Shapes that the spec allows each task: the only place that reads modes, depths and trees."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import SpeculationSpec, TaskDepthSpec, TaskSpec
from specdecode_worker.contract import DRAFT_FREE, OTHER_TASK, Method, TreeShape, draft_passes


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one task's shapes. Plain decoding is allowed if ``least`` is 0."""

    least: int
    most: int
    initial: int
    max_nodes: int
    top_k: int
    methods: tuple[Method, ...] = ("eagle3",)
    """Methods of the task's draft and of the drafts with passes that are merged with it."""

    def passes(self, depth: int) -> int:
        """Return the draft passes of a tree of this depth."""
        return sum(draft_passes(method, depth) for method in self.methods)

    def nearest(self, shape: TreeShape) -> TreeShape:
        """Return ``shape`` if it is within the bounds, else the chain of the nearest depth."""
        allowed = self.least <= shape.depth <= self.most and shape.nodes <= self.max_nodes
        if allowed and max(shape.ranks) < self.top_k:
            return shape
        return TreeShape.chain(max(self.least, min(self.most, shape.depth)))


def plans(speculation: SpeculationSpec) -> bool:
    """Return whether rows are planned: by the mode, or because a task of a static deployment is not static."""
    if speculation.method == "none" or speculation.mode == "Off":
        return False
    return speculation.mode != "Static" or any(task.mode or task.depth for task in speculation.tasks)


def follows(speculation: SpeculationSpec) -> bool:
    """Return whether the plan is applied. In Advisory mode it is only reported."""
    return plans(speculation) and speculation.mode != "Advisory"


def bounds_of(speculation: SpeculationSpec, name: str) -> Bounds:
    """Return the bounds of a task or of ``other``: its own fields, completed by those of the deployment."""
    task = _task(speculation, name)
    mode = task.mode or ("Static" if speculation.mode == "Static" else "Auto")
    least, most, initial = _depths(speculation, task.depth or TaskDepthSpec())
    tree, methods = speculation.tree, {draft.name: draft.method for draft in speculation.drafts}
    merged = (methods[one.draft] for one in task.merge)
    used = methods.get(task.draft or "", speculation.method), *(one for one in merged if one not in DRAFT_FREE)
    if "Off" in (mode, speculation.mode) or speculation.method == "none":
        return Bounds(0, 0, 0, tree.max_nodes, 1, used)
    if mode == "Static":
        return Bounds(initial, initial, initial, tree.max_nodes, 1, used)
    return Bounds(least, most, initial, tree.max_nodes, tree.top_k, used)


def has_own(speculation: SpeculationSpec, name: str) -> bool:
    """Return whether the spec says more of the task than its name. It then has rows before it is ever seen."""
    task = _task(speculation, name)
    return task.mode is not None or task.depth is not None


def names(speculation: SpeculationSpec) -> tuple[str, ...]:
    """Return ``other`` and the tasks of the spec."""
    return (OTHER_TASK, *(task.name for task in speculation.tasks if task.name != OTHER_TASK))


def _task(speculation: SpeculationSpec, name: str) -> TaskSpec:
    return next((task for task in speculation.tasks if task.name == name), TaskSpec(name=name))


def _depths(speculation: SpeculationSpec, own: TaskDepthSpec) -> tuple[int, int, int]:
    """Return (least, most, initial). A field of the task wins, and fields of the deployment give way to it."""
    general = speculation.depth
    given = [depth for depth in (own.min, own.initial, own.max) if depth is not None]
    most = own.max if own.max is not None else max([general.max, *given])
    most = min(most, speculation.tree.max_nodes)
    least = min(most, own.min if own.min is not None else min([general.min, *given]))
    initial = own.initial if own.initial is not None else general.initial
    return least, most, max(least, min(most, initial))
