"""Events of a deployment: one for each decision, and one for each condition that turned bad or recovered. Pure.

Status has the history and the conditions too, so that a lost Event loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from specdecode_operator.api.v1alpha1 import Condition, ConditionType, Decision, Status
from specdecode_operator.controller.status.build import named_pods

BAD = {
    ConditionType.stalled: "True",
    ConditionType.available: "False",
    ConditionType.draft_compatible: "False",
    ConditionType.scaling_limited: "True",
    ConditionType.reports_fresh: "False",
    ConditionType.pinned: "False",
    ConditionType.workers_healthy: "False",
}
"""Conditions with Events, and the status that is bad. Kubernetes writes the Events of pods."""
ON_LOSS_ONLY = (ConditionType.available,)
"""Conditions that are bad from the start, which is no news. Only a loss after they were good is."""
REPEATED_REASONS = ("ImageNotPulled", "WorkerFailing")
"""Reasons of retries, whose message changes from phase to phase."""
EXPECTED_REASONS = ("ScaledToZero",)
"""Reasons of a bad status that the user asked for."""

_REASONS = {"Plan": "PlanChanged", "Replicas": "Scaled", "Steering": "SteeringChanged"}


class EventNotice(NamedTuple):
    """Content of an Event."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def event_notices(before: Status, after: Status, changes: Iterable[Decision]) -> tuple[EventNotice, ...]:
    """Return the Events of one reconcile.

    Args:
        before: Status as the API server had it, so that each Event is written once.
        after: Status as it is now.
        changes: Decisions made in this reconcile, oldest first.
    """
    return (*map(_decided, changes), *_transitions(before, after))


def _decided(change: Decision) -> EventNotice:
    message = f"{change.load}: {change.before} -> {change.after}: {change.reason}"
    return EventNotice("Normal", _REASONS[change.kind], message)


def _transitions(before: Status, after: Status) -> Iterator[EventNotice]:
    old_by_type = {condition.type: condition for condition in before.conditions}
    new_by_type = {condition.type: condition for condition in after.conditions}
    for kind, bad in BAD.items():
        old, new = old_by_type.get(kind), new_by_type.get(kind)
        if new is not None and new.status == bad:
            if _is_news(kind, old, new):
                yield EventNotice("Warning", new.reason, new.message)
        elif old is not None and old.status == bad:
            yield _recovery(kind, old, new)


def _is_news(kind: ConditionType, old: Condition | None, new: Condition) -> bool:
    if new.reason in EXPECTED_REASONS:
        return False
    if kind in ON_LOSS_ONLY:
        return old is not None and old.status != new.status
    return not _is_same(old, new)


def _recovery(kind: ConditionType, old: Condition, new: Condition | None) -> EventNotice:
    if new is not None:
        return EventNotice("Normal", new.reason, new.message)
    return EventNotice("Normal", "Resolved", f"{kind} with reason {old.reason} is over")


def _is_same(old: Condition | None, new: Condition) -> bool:
    """Return whether two bad states of a condition are about the same thing.

    Another message of the API server is news, and so is another pod. Another number is not.
    """
    if old is None or old.status != new.status or old.reason != new.reason:
        return False
    if old.message == new.message or new.type == ConditionType.scaling_limited:
        return True
    pods = named_pods(new.message)
    varies = new.type == ConditionType.workers_healthy or new.reason in REPEATED_REASONS
    return bool(pods) and varies and pods <= named_pods(old.message)
