"""What the spec lets a task run: one place for modes, depths and trees, so that nobody else asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import SpeculationSpec, TaskDepthSpec, TaskSpec
from specdecode_worker.contract import OTHER_TASK, TreeShape


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one task's shapes. ``least`` 0 allows plain decoding."""

    least: int
    most: int
    initial: int
    max_nodes: int
    top_k: int

    def holds(self, shape: TreeShape) -> bool:
        return (
            self.least <= shape.depth <= self.most and shape.nodes <= self.max_nodes and max(shape.ranks) < self.top_k
        )

    def nearest(self, shape: TreeShape) -> TreeShape:
        """``shape`` where it is allowed, else the chain of the nearest depth."""
        return shape if self.holds(shape) else TreeShape.chain(max(self.least, min(self.most, shape.depth)))


def plans(speculation: SpeculationSpec) -> bool:
    """Whether rows are planned at all: the mode says so, or a task has one of its own while the rest is static."""
    if speculation.method == "none" or speculation.mode == "Off":
        return False
    return speculation.mode != "Static" or any(task.mode or task.depth for task in speculation.tasks)


def follows(speculation: SpeculationSpec) -> bool:
    """Whether what is planned runs. Advisory plans to tell."""
    return plans(speculation) and speculation.mode != "Advisory"


def bounds_of(speculation: SpeculationSpec, name: str) -> Bounds:
    """Of a task, or of ``other``: its own where it has some, the deployment's where not."""
    task = _task(speculation, name)
    mode = task.mode or ("Static" if speculation.mode == "Static" else "Auto")
    least, most, initial = _depths(speculation, task.depth or TaskDepthSpec())
    tree = speculation.tree
    if mode == "Off" or speculation.mode == "Off" or speculation.method == "none":
        return Bounds(0, 0, 0, tree.max_nodes, 1)
    if mode == "Static":
        return Bounds(initial, initial, initial, tree.max_nodes, 1)
    return Bounds(least, most, initial, tree.max_nodes, tree.top_k)


def has_own(speculation: SpeculationSpec, name: str) -> bool:
    """Whether the spec says more of the task than its name: then it has rows before it was ever seen."""
    task = _task(speculation, name)
    return task.mode is not None or task.depth is not None


def deepest(speculation: SpeculationSpec) -> int:
    """Depth to which anything may be drafted."""
    return max(bounds_of(speculation, name).most for name in names(speculation))


def names(speculation: SpeculationSpec) -> tuple[str, ...]:
    """``other`` and the tasks of the spec."""
    return (OTHER_TASK, *(task.name for task in speculation.tasks if task.name != OTHER_TASK))


def _task(speculation: SpeculationSpec, name: str) -> TaskSpec:
    return next((task for task in speculation.tasks if task.name == name), TaskSpec(name=name))


def _depths(speculation: SpeculationSpec, own: TaskDepthSpec) -> tuple[int, int, int]:
    """(least, most, initial): what the task says wins, and the rest gives way to it; a tree has its depth in nodes."""
    general = speculation.depth
    given = [depth for depth in (own.min, own.initial, own.max) if depth is not None]
    least = own.min if own.min is not None else min([general.min, *given])
    most = own.max if own.max is not None else max([general.max, *given])
    most = min(most, speculation.tree.max_nodes)
    least = min(least, most)
    initial = own.initial if own.initial is not None else general.initial
    return least, most, max(least, min(most, initial))
