"""Text of ``status``: one line per deployment, and for a single one its tasks and conditions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specdecode_operator.api.v1alpha1 import Condition, Spec, Status
from specdecode_operator.plugin.text import age, figure, table, word

HEAD = ("NAME", "READY", "MODE", "DEPTH", "ACCEPT", "TOK/STEP", "SPEEDUP", "TOK/S", "RUN", "WAIT", "WANT", "DECIDED")
_GOOD_WHEN_FALSE = {"ScalingLimited", "Progressing", "Stalled", "Reconciling"}
_NEVER_A_PROBLEM = {"Progressing", "Reconciling", "DraftRollout"}
"""Conditions that say whether a change is under way."""


def overview(resources: Sequence[dict[str, Any]], now: float, *, namespaces: bool = False) -> list[str]:
    """Return a table; below it the reason of each deployment that has a problem."""
    if not resources:
        return ["no SpecDecodeDeployments found"]
    head = ("NAMESPACE", *HEAD) if namespaces else HEAD
    rows = [
        ((resource["metadata"]["namespace"],) if namespaces else ()) + _row(resource, now)
        for resource in sorted(resources, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"]))
    ]
    trouble = [line for resource in resources for line in _reason(resource)]
    return [*table(head, rows), *(["", *trouble] if trouble else [])]


def detail(resource: dict[str, Any], now: float) -> list[str]:
    """Return the line, the tasks and the conditions of one deployment."""
    status = status_of(resource)
    lines = overview([resource], now)
    if status.tasks:
        rows = [
            (task.name, word(task.mode), word(task.depth), figure(task.acceptance_rate), figure(task.accepted_length))
            for task in status.tasks
        ]
        lines += ["", *table(("TASK", "MODE", "DEPTH", "ACCEPT", "TOK/STEP"), rows)]
    lines += ["", f"seconds of a worker's start: {status.start}"] if status.start else []
    conditions = [(one.type, one.status, one.reason, age(one.last_transition_time, now)) for one in status.conditions]
    return [*lines, "", *table(("CONDITION", "STATUS", "REASON", "SINCE"), conditions)] if conditions else lines


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


def _row(resource: dict[str, Any], now: float) -> tuple[str, ...]:
    status = status_of(resource)
    speculation, traffic = status.speculation, status.traffic
    newest = speculation.history[0] if speculation and speculation.history else None
    return (
        resource["metadata"]["name"],
        word(status.ready),
        mode_of(resource),
        word(speculation.depth if speculation else None),
        figure(speculation.acceptance_rate if speculation else None),
        figure(speculation.accepted_length if speculation else None),
        figure(speculation.speedup if speculation else None),
        figure(traffic.tokens_per_second if traffic else None, 0),
        figure(traffic.running if traffic else None, 1),
        figure(traffic.waiting if traffic else None, 1),
        word(status.capacity.wanted_replicas if status.capacity else None),
        age(newest.time if newest else None, now),
    )


def _reason(resource: dict[str, Any]) -> list[str]:
    reason = (resource.get("status") or {}).get("reason")
    return [f"{resource['metadata']['name']}: {reason}"] if reason else []
