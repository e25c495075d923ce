"""Pins, ``speculation.pin`` and ``speculation.tasks[].pin``: shapes that run at every load in every mode. Pure.

As text, ``chain:3`` or ``none`` pins all tasks, ``code=chain:6,chat=none`` the named tasks, and ``none,code=chain:6``
both. The guard stays active. An invalid pin changes nothing: the previous pin or mode stays in force, and a condition
and an Event show the problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.errors import SpecError
from specdecode_worker.contract import OTHER_TASK, Plan, PlanRow, TreeShape

MAX_DEPTH = 16
"""Deepest shape that can be pinned; the limit of spec.speculation.depth and of plans."""
EXAMPLES = "write chain:3, none, or tasks such as code=chain:6,chat=none"
"""End of error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Pinned shapes: one shape for all tasks, shapes of some tasks, or both."""

    every: TreeShape | None = None
    """Shape of all tasks without one of their own; None if these are not pinned."""
    by_task: dict[str, TreeShape] = field(default_factory=dict)
    """Shapes of tasks that are pinned by name."""

    def over(self, plan: Plan) -> Plan:
        """Return ``plan`` with the pinned shapes at every load. Rows of other tasks stay as they are."""
        shapes = [*self.by_task.values(), *([self.every] if self.every is not None else [])]
        deepest = max(plan.max_depth, *(shape.depth for shape in shapes))
        others = tuple(row for row in plan.rows if self.shape_of(row.task) is None)
        initial = plan.initial if self.every is None else self.every
        rows = (*others, *self._rows(plan))
        return plan.model_copy(update={"rows": rows, "initial": initial, "max_depth": deepest})

    def shape_of(self, task: str) -> TreeShape | None:
        """Return the pinned shape of a task, or None if the task is not pinned."""
        return self.by_task.get(task, self.every)

    def _rows(self, plan: Plan) -> Iterator[PlanRow]:
        loads = product(range(len(plan.buckets.concurrency) + 1), range(len(plan.buckets.context) + 1))
        for (concurrency, context), (task, shape) in product(loads, self.by_task.items()):
            yield PlanRow(concurrency=concurrency, context=context, task=task, shape=shape)


def pin_text(speculation: SpeculationSpec) -> str:
    """Return the pins of the spec as one text; empty without any."""
    every = [speculation.pin] if speculation.pin else []
    return ",".join([*every, *(f"{task.name}={task.pin}" for task in speculation.tasks if task.pin)])


def pin_operations(resource: Mapping[str, Any], pin: Pin) -> list[dict[str, Any]]:
    """Return the operations of a JSON patch that make ``pin`` the only one of a resource. Tasks of it are added.

    Args:
        resource: A SpecDecodeDeployment. The patch fails if its tasks changed meanwhile.
        pin: The pins; without any, all are removed.
    """
    speculation, base = resource["spec"].get("speculation") or {}, "/spec/speculation"
    operations = list(_set(f"{base}/pin", speculation.get("pin"), pin.every))
    tasks = speculation.get("tasks") or []
    for index, task in enumerate(tasks):
        path = f"{base}/tasks/{index}"
        changes = list(_set(f"{path}/pin", task.get("pin"), pin.by_task.get(task["name"])))
        operations += [{"op": "test", "path": f"{path}/name", "value": task["name"]}, *changes] if changes else []
    missing = pin.by_task.keys() - {task["name"] for task in tasks}
    added = [{"name": name, "pin": str(pin.by_task[name])} for name in sorted(missing)]
    if added and not tasks:
        return [*operations, {"op": "add", "path": f"{base}/tasks", "value": added}]
    return [*operations, *({"op": "add", "path": f"{base}/tasks/-", "value": one} for one in added)]


def _set(path: str, before: str | None, shape: TreeShape | None) -> Iterator[dict[str, Any]]:
    if shape is not None:
        yield {"op": "add", "path": path, "value": str(shape)}
    elif before is not None:
        yield {"op": "remove", "path": path}


def read_pin(text: str, speculation: SpeculationSpec) -> Pin | None:
    """Parse the text of pins.

    Args:
        text: The pins, as `pin_text` writes them or a user of the plugin.
        speculation: The spec, which has the names of the tasks.

    Returns:
        The pin, or None for an empty text.

    Raises:
        SpecError: The text is invalid. The message says what to write instead.
    """
    if not text.strip():
        return None
    if speculation.method == "none":
        raise SpecError("speculation.pin: speculation.method is none, so there is no draft to pin a shape of")
    known = {OTHER_TASK, *(task.name for task in speculation.tasks)}
    every: TreeShape | None = None
    by_task: dict[str, TreeShape] = {}
    for task, shape in _assignments(text):
        if not task:
            every = _shape(shape)
        elif task not in known:
            raise SpecError(f"speculation.pin: no task {task!r}; there are {', '.join(sorted(known))}")
        elif task in by_task:
            raise SpecError(f"speculation.pin: task {task!r} is pinned twice")
        else:
            by_task[task] = _shape(shape)
    return Pin(every=every, by_task=by_task)


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """Yield task and shape of each part of ``none,code=tree:2,1,chat=none``. All tasks have the name "".

    Shapes may have commas too. A comma therefore ends a part only if a name and ``=`` follow it.
    """
    for number, part in enumerate(re.split(r",(?=[^,=]*=)", text)):
        task, equals, shape = part.partition("=")
        if equals and task.strip():
            yield task.strip(), shape.strip()
        elif equals or number:
            raise SpecError(f"speculation.pin: {part.strip()!r} names no task; {EXAMPLES}")
        else:
            yield "", part.strip()


def _shape(text: str) -> TreeShape:
    if not text:
        raise SpecError(f"speculation.pin: a shape is missing; {EXAMPLES}")
    try:
        shape = TreeShape.parse(text)
    except ValueError:
        raise SpecError(f"speculation.pin: {text!r} is no shape of at most 63 nodes; {EXAMPLES}") from None
    if not shape.nodes and text != "none":
        raise SpecError(f"speculation.pin: {text!r} drafts nothing; write none for plain decoding")
    if shape.depth > MAX_DEPTH:
        raise SpecError(f"speculation.pin: {text!r} is {shape.depth} deep, at most {MAX_DEPTH} can be run")
    return shape
