"""The annotation ``specdecode.io/pin``: a shape that runs at every load, whatever the mode says. Pure.

``chain:3`` or ``none`` pins every task, ``code=chain:6,chat=none`` some of them. The guard stays on. A value that
does not read changes nothing: what was in force stays in force, and a condition and an Event say what is wrong.
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
"""Largest depth of a pinned shape, as of spec.speculation.depth."""
EXAMPLES = "write chain:3, none, or tasks such as code=chain:6,chat=none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Pin in force: one shape for all tasks, or shapes by task."""

    every: TreeShape | None = None
    by_task: dict[str, TreeShape] = field(default_factory=dict)

    def over(self, plan: Plan) -> Plan:
        """``plan`` with the pinned shapes at every load; rows of tasks that are not pinned stay."""
        if self.every is not None:
            deepest = max(plan.max_depth, self.every.depth)
            return plan.model_copy(update={"rows": (), "initial": self.every, "max_depth": deepest})
        others = tuple(row for row in plan.rows if row.task not in self.by_task)
        deepest = max(plan.max_depth, *(shape.depth for shape in self.by_task.values()))
        return plan.model_copy(update={"rows": (*others, *self._rows(plan)), "max_depth": deepest})

    def shape_of(self, task: str) -> TreeShape | None:
        """Return the pinned shape of a task; None if it is not pinned."""
        return self.by_task.get(task) if self.every is None else self.every

    def _rows(self, plan: Plan) -> Iterator[PlanRow]:
        loads = product(range(len(plan.buckets.concurrency) + 1), range(len(plan.buckets.context) + 1))
        for (concurrency, context), (task, shape) in product(loads, self.by_task.items()):
            yield PlanRow(concurrency=concurrency, context=context, task=task, shape=shape)


def read_pin(text: str, speculation: SpeculationSpec) -> Pin | None:
    """None for an empty text. Raises SpecError that says what to write instead."""
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
    """``code=tree:2,1,chat=none``: commas stand inside shapes too, so a task starts where a name and = do."""
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
