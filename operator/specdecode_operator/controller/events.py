"""Which Events a look brings: every decision, and every condition that turned bad or well again. Pure.

Losing one loses nothing: status has the history and the conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from specdecode_operator.api.v1alpha1 import Condition, ConditionType, Decision, Status

BAD = {
    ConditionType.reconciled: "False",
    ConditionType.draft_compatible: "False",
    ConditionType.scaling_limited: "True",
    ConditionType.reports_fresh: "False",
    ConditionType.pinned: "False",
    ConditionType.workers_alike: "False",
}
"""Conditions worth an Event, and the status that is bad. Pods have Events of their own, decisions tell of speed."""

_REASONS = {"Plan": "PlanChanged", "Replicas": "Scaled", "Steering": "SteeringChanged"}


class EventNotice(NamedTuple):
    """What an Event says."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def notices(before: Status, after: Status, changes: Iterable[Decision]) -> tuple[EventNotice, ...]:
    """``before`` is what stood in the API server, so that an Event comes once."""
    return (*map(_decided, changes), *_turned(before, after))


def _decided(change: Decision) -> EventNotice:
    message = f"{change.load}: {change.before} -> {change.after}: {change.reason}"
    return EventNotice("Normal", _REASONS[change.kind], message)


def _turned(before: Status, after: Status) -> Iterator[EventNotice]:
    known = {condition.type: condition for condition in before.conditions}
    for kind, bad in BAD.items():
        new = next((condition for condition in after.conditions if condition.type == kind), None)
        old = known.get(kind)
        if new is not None and new.status == bad and not _same(old, new):
            yield EventNotice("Warning", new.reason, new.message)
        elif old is not None and old.status == bad and (new is None or new.status != bad):
            yield EventNotice("Normal", new.reason if new else "Resolved", new.message if new else f"{kind} is over")


def _same(old: Condition | None, new: Condition) -> bool:
    """A refusal with other words is news, and so is another pod; a limit with another number is not."""
    if old is None or old.status != new.status or old.reason != new.reason:
        return False
    if new.type == ConditionType.workers_alike:
        return _pods(old.message) >= _pods(new.message)
    return new.type == ConditionType.scaling_limited or old.message == new.message


def _pods(message: str) -> set[str]:
    return set(re.findall(r"\bpod (\S+):", message))
