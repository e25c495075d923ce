"""Tables and figures of all commands, and what they read of a resource. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specdecode_operator.api.v1alpha1 import Condition, Spec, Status
from specdecode_operator.state.learned import LearnedState, StepTimeCell, range_name
from specdecode_operator.telemetry.counters import SEQUENCES, VERIFY_TOKENS, Moments
from specdecode_operator.times import seconds_of_timestamp
from specdecode_worker.contract import ONE_PASS, Method, Plan

# Text of tables, ages and numbers. Pure.

ABSENT = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Return lines of left-aligned columns, as kubectl prints them."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    return [
        indent + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    ]


def figure(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:+.0f} %"


def word(value: object) -> str:
    return ABSENT if value is None or value == "" else str(value)


def age(time: str | None, now: float) -> str:
    """Return the age of a Kubernetes timestamp, such as 45s, 12m, 5h or 3d."""
    if not time:
        return ABSENT
    try:
        return _age(now - seconds_of_timestamp(time))
    except ValueError:
        return ABSENT


def _age(seconds: float) -> str:
    """Return seconds as words. Clocks differ, so a time may lie ahead: its age is 0."""
    seconds = max(0.0, seconds)
    for unit, size, most in (("s", 1, 120), ("m", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def wrapped(text: str, indent: str, width: int = 110) -> list[str]:
    return textwrap.wrap(text, width=width, initial_indent=indent, subsequent_indent=indent) or []


# Tables of the stored measurements: acceptance by depth, step times, rows of the plan. Pure.

_LEAST_STEPS = 1
_LEAST_STEPS_OF_A_GAIN = 8
"""Steps with answers below which a gain is mostly noise."""


def acceptance_lines(learned: LearnedState) -> Iterator[str]:
    """Yield the acceptance rate of the draft's first choice by task and depth, along the main path."""
    main = [cell for cell in learned.acceptance if cell.parent == "main"]
    tasks = sorted({cell.task for cell in main})
    if not tasks:
        return
    rates: dict[tuple[str, int], tuple[float, float]] = {}
    for cell in main:
        hits, total = rates.get((cell.task, cell.depth), (0.0, 0.0))
        rates[cell.task, cell.depth] = hits + cell.hits, total + cell.total
    depths = sorted({depth for _, depth in rates})
    rows = [(task, *(_rate(rates.get((task, depth))) for depth in depths)) for task in tasks]
    yield ""
    yield from table(("ACCEPTANCE", *(f"DEPTH {depth}" for depth in depths)), rows, "  ")


def step_lines(learned: LearnedState, method: Method, now: float) -> Iterator[str]:
    """Yield the step times at the context of the current load, compared with plain steps of as many sequences.

    ``method`` is that of the draft. Parallel drafts make one pass at every depth.
    """
    cells = [cell for cell in learned.costs if cell.context_bucket == learned.load.context_bucket and not cell.prefill]
    timed = sorted(
        (_Steps(cell) for cell in cells if Moments(cell.values).count >= _LEAST_STEPS), key=lambda s: s.order
    )
    if not timed:
        return
    rows = [
        (
            steps.name(method),
            figure(steps.sequences, 1),
            figure(steps.milliseconds, 1),
            figure(steps.tokens, 2),
            figure(steps.per_token, 1),
            percent(steps.gain(timed)),
            f"{steps.count:.0f}",
            _age(now - steps.at),
        )
        for steps in timed
    ]
    yield ""
    head = ("STEP", "SEQUENCES", "MS/STEP", "TOKENS", "MS/TOKEN", "GAIN", "STEPS SEEN", "LAST")
    yield from table(head, rows, "  ")


def row_lines(learned: LearnedState) -> Iterator[str]:
    """Yield the plan at the context of the current load: a line per task, a column per concurrency."""
    plan = learned.plan
    if plan is None:
        return
    yield ""
    if not plan.rows:
        yield f"  The plan has no rows. The shape at every load is {plan.initial}."
        return
    _, context = learned.load.row(plan.buckets)
    heads = [range_name(plan.buckets.concurrency, index) for index in range(len(plan.buckets.concurrency) + 1)]
    tasks = sorted({row.task for row in plan.rows})
    yield from table(("PLAN: TASK", *heads), [(task, *_shapes(plan, task, context)) for task in tasks], "  ")


def _shapes(plan: Plan, task: str, context: int) -> Iterator[str]:
    for concurrency in range(len(plan.buckets.concurrency) + 1):
        yield str(plan.shape(concurrency, context, task))


def _rate(hits: tuple[float, float] | None) -> str:
    return figure(hits[0] / hits[1]) if hits and hits[1] else "-"


class _Steps:
    """Step times of one kind of step."""

    def __init__(self, cell: StepTimeCell) -> None:
        moments = Moments(cell.values)
        self.count, self.at = moments.count, cell.at
        self.sequences = moments.mean_of(SEQUENCES)
        self.nodes = round(moments.mean_of(VERIFY_TOKENS) / self.sequences - 1) if self.sequences else 0
        self.milliseconds = 1000 * moments.mean_seconds
        # Steps that a worker ran to measure their time emit no tokens.
        self.answering = max(0.0, moments.count - cell.made_up)
        sequences = self.answering * self.sequences
        self.tokens = moments.emitted / sequences if moments.emitted and sequences else None
        self.passes = cell.draft_passes
        self.order = (round(self.sequences), self.passes, self.nodes)

    def name(self, method: Method) -> str:
        if self.nodes and method in ONE_PASS:
            return f"one pass, {self.nodes} nodes"
        if not self.nodes:
            return "plain" if not self.passes else f"plain, {self.passes} shadow passes"
        if self.nodes < self.passes:
            return f"depth {self.passes}, {self.nodes} verified"
        return f"depth {self.passes}" if self.nodes == self.passes else f"depth {self.passes}, {self.nodes} nodes"

    @property
    def per_token(self) -> float | None:
        return self.milliseconds / self.tokens if self.tokens else None

    def gain(self, timed: list[_Steps]) -> float | None:
        """Return the gain in percent over plain steps of about as many sequences: tokens in the same time."""
        plain = [steps for steps in timed if not steps.nodes and not steps.passes and steps.per_token]
        if self.answering < _LEAST_STEPS_OF_A_GAIN:
            return None
        near = min(plain, key=lambda steps: abs(steps.sequences - self.sequences), default=None)
        if near is None or near is self or not self.per_token or near.per_token is None:
            return None
        is_comparable = 0.8 <= self.sequences / near.sequences <= 1.25
        return 100 * (near.per_token / self.per_token - 1) if is_comparable else None


# What a resource says. Pure.

_GOOD_WHEN_FALSE = {"ScalingLimited", "Progressing", "Stalled", "Reconciling"}
_NEVER_A_PROBLEM = {"Progressing", "Reconciling", "DraftRollout"}
"""Conditions that say whether a change is under way."""


def spec_of(resource: dict[str, Any]) -> Spec:
    """Return the spec."""
    return Spec.model_validate(resource["spec"])


def status_of(resource: dict[str, Any]) -> Status:
    """Return the status; it is empty before the operator wrote one."""
    return Status.model_validate(resource.get("status") or {})


def mode_of(resource: dict[str, Any]) -> str:
    """Return what decides the depth: a pause, else a pin, else the mode."""
    speculation = resource["spec"].get("speculation") or {}
    if resource["spec"].get("paused"):
        return "Paused"
    if speculation.get("method") == "none" or not speculation:
        return "none"
    pinned = (resource.get("status") or {}).get("speculation", {}).get("pinned")
    return f"Pin {pinned}" if pinned else str(speculation.get("mode", "Auto"))


def unmet(conditions: Iterable[Condition]) -> list[Condition]:
    """Return the conditions that show a problem."""
    return [
        condition
        for condition in conditions
        if condition.status == ("True" if condition.type in _GOOD_WHEN_FALSE else "False")
        and condition.type not in _NEVER_A_PROBLEM
    ]


def measuring(conditions: Iterable[Condition]) -> str | None:
    """Return what the estimates lack, while the operator measures before its first decision."""
    return next((condition.message for condition in conditions if condition.reason == "Measuring"), None)
