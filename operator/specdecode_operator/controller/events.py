"""Events of a deployment: one for each decision, and one for each condition that became bad or recovered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION, Condition, ConditionType, Decision, Status
from specdecode_operator.controller.status.build import named_pods
from specdecode_operator.errors import ClusterError
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import EVENTS
from specdecode_operator.times import iso
from specdecode_operator.types import Key

log = logging.getLogger(__name__)

# Events of a deployment: one for each decision, and one for each condition that became bad or recovered. Pure.
#
# A lost Event does no harm, because status has the same history and conditions.

BAD = {
    ConditionType.stalled: "True",
    ConditionType.available: "False",
    ConditionType.draft_compatible: "False",
    ConditionType.scaling_limited: "True",
    ConditionType.reports_fresh: "False",
    ConditionType.pinned: "False",
    ConditionType.workers_healthy: "False",
}
"""Conditions that cause Events, each with the status that is bad. Kubernetes itself writes Events about pods."""
ON_LOSS_ONLY = (ConditionType.available,)
"""Conditions that are bad for every new deployment. They cause an Event only when a good status is lost."""
REPEATED_REASONS = ("ImageNotPulled", "WorkerFailing")
"""Reasons of retried actions, whose message changes with each retry."""
EXPECTED_REASONS = ("ScaledToZero",)
"""Reasons of a bad status that a user caused on purpose."""

_REASONS = {
    "Plan": "PlanChanged",
    "Replicas": "Scaled",
    "Steering": "SteeringChanged",
    "Draft": "DraftRollout",
    "Drift": "DraftDrift",
}


class EventNotice(NamedTuple):
    """Content of an Event."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def event_notices(before: Status, after: Status, changes: Iterable[Decision]) -> tuple[EventNotice, ...]:
    """Return the Events of one reconcile.

    Args:
        before: Status that the API server has. Events are written only for differences from it.
        after: Status that is written now.
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
    """Return whether a bad condition needs an Event."""
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
    """Return whether two bad states of a condition report the same problem.

    Another message of the API server or another pod is a new problem. Other numbers or fewer pods are not.
    """
    if old is None or old.status != new.status or old.reason != new.reason:
        return False
    if old.message == new.message or new.type == ConditionType.scaling_limited:
        return True
    pods = named_pods(new.message)
    varies = new.type == ConditionType.workers_healthy or new.reason in REPEATED_REASONS
    return bool(pods) and varies and pods <= named_pods(old.message)


# Writing of Kubernetes Events. A lost Event does no harm: status has the same history and conditions.

MAX_MESSAGE = 1024
"""Longest message of an Event, in characters."""


async def record_events(client: KubeClient, key: Key, uid: str, notices: Iterable[EventNotice], now: float) -> None:
    """Create one Event for each notice. An error of the API server is logged and not raised."""
    for index, notice in enumerate(notices):
        try:
            await client.create(EVENTS, _event(key, uid, f"{int(now * 1000):x}{index:x}", notice, now))
        except ClusterError as error:
            log.warning("%s/%s: no Event was written: %s", *key, error)


def _event(key: Key, uid: str, suffix: str, notice: EventNotice, now: float) -> dict[str, Any]:
    namespace, name = key
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{suffix}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
        "type": notice.type,
        "reason": notice.reason,
        "message": notice.message[:MAX_MESSAGE],
        "source": {"component": "specdecode-operator"},
        "firstTimestamp": iso(now),
        "lastTimestamp": iso(now),
        "count": 1,
    }
