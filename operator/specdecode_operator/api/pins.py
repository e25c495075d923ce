"""The annotation ``specdecode.io/pin``: draft shapes that run at every load in every mode. Pure.

``chain:3`` or ``none`` pins all tasks, ``code=chain:6,chat=none`` pins the named tasks. The guard stays active. An
invalid value changes nothing: the previous pin or mode stays in force, and a condition and an Event show the problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from specdecode_operator.api.v1alpha1 import PIN_ANNOTATION, SpeculationSpec
from specdecode_operator.errors import SpecError
from specdecode_worker.contract import OTHER_TASK, Plan, PlanRow, TreeShape

MAX_DEPTH = 16
"""Deepest shape that can be pinned; the limit of spec.speculation.depth and of plans."""
EXAMPLES = "write chain:3, none, or tasks such as code=chain:6,chat=none"
"""End of error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Pinned shapes: one shape for all tasks, or shapes of some tasks."""

    every: TreeShape | None = None
    """Shape of all tasks; None if tasks are pinned by name."""
    by_task: dict[str, TreeShape] = field(default_factory=dict)
    """Shapes of the pinned tasks; empty if ``every`` is set."""

    def over(self, plan: Plan) -> Plan:
        """Return ``plan`` with the pinned shapes at every load. Rows of other tasks stay as they are."""
        if self.every is not None:
            deepest = max(plan.max_depth, self.every.depth)
            return plan.model_copy(update={"rows": (), "initial": self.every, "max_depth": deepest})
        others = tuple(row for row in plan.rows if row.task not in self.by_task)
        deepest = max(plan.max_depth, *(shape.depth for shape in self.by_task.values()))
        return plan.model_copy(update={"rows": (*others, *self._rows(plan)), "max_depth": deepest})

    def shape_of(self, task: str) -> TreeShape | None:
        """Return the pinned shape of a task, or None if the task is not pinned."""
        return self.by_task.get(task) if self.every is None else self.every

    def _rows(self, plan: Plan) -> Iterator[PlanRow]:
        loads = product(range(len(plan.buckets.concurrency) + 1), range(len(plan.buckets.context) + 1))
        for (concurrency, context), (task, shape) in product(loads, self.by_task.items()):
            yield PlanRow(concurrency=concurrency, context=context, task=task, shape=shape)


def read_pin(text: str, speculation: SpeculationSpec) -> Pin | None:
    """Parse the value of the annotation.

    Args:
        text: The value; empty without the annotation.
        speculation: The spec, which has the names of the tasks.

    Returns:
        The pin, or None for an empty text.

    Raises:
        SpecError: The value is invalid. The message says what to write instead.
    """
    if not text.strip():
        return None
    if speculation.method == "none":
        raise SpecError(f"{PIN_ANNOTATION}: speculation.method is none, so there is no draft to pin a shape of")
    if "=" not in text:
        return Pin(every=_shape(text.strip()))
    known = {OTHER_TASK, *(task.name for task in speculation.tasks)}
    by_task: dict[str, TreeShape] = {}
    for task, shape in _assignments(text):
        if task not in known:
            raise SpecError(f"{PIN_ANNOTATION}: no task {task!r}; there are {', '.join(sorted(known))}")
        if task in by_task:
            raise SpecError(f"{PIN_ANNOTATION}: task {task!r} is pinned twice")
        by_task[task] = _shape(shape)
    return Pin(by_task=by_task)


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """Yield task and shape of each part of ``code=tree:2,1,chat=none``.

    Shapes may have commas too. A comma therefore ends a part only if a name and ``=`` follow it.
    """
    for part in re.split(r",(?=[^,=]*=)", text):
        task, equals, shape = part.partition("=")
        if not equals:
            raise SpecError(f"{PIN_ANNOTATION}: {part.strip()!r} names no task; {EXAMPLES}")
        yield task.strip(), shape.strip()


def _shape(text: str) -> TreeShape:
    if not text:
        raise SpecError(f"{PIN_ANNOTATION}: a shape is missing; {EXAMPLES}")
    try:
        shape = TreeShape.parse(text)
    except ValueError:
        raise SpecError(f"{PIN_ANNOTATION}: {text!r} is no shape of at most 63 nodes; {EXAMPLES}") from None
    if not shape.nodes and text != "none":
        raise SpecError(f"{PIN_ANNOTATION}: {text!r} drafts nothing; write none for plain decoding")
    if shape.depth > MAX_DEPTH:
        raise SpecError(f"{PIN_ANNOTATION}: {text!r} is {shape.depth} deep, at most {MAX_DEPTH} can be run")
    return shape
