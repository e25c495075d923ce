"""Events of a pod that say why it does not start, which its status does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import EVENTS

START_PROBLEMS = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
"""Reasons of Warning events after which a pod stays in ContainerCreating."""


async def mount_problem(client: KubeClient, namespace: str, pod_uid: str) -> str | None:
    """Return reason and message of the latest Warning about the pod's volumes or sandbox, or None.

    Raises:
        ClusterError: The events could not be listed.
    """
    events = await client.list(EVENTS, namespace, fields=f"involvedObject.uid={pod_uid},type=Warning")
    problems = [event for event in events.get("items") or [] if event.get("reason") in START_PROBLEMS]
    if not problems:
        return None
    latest = max(problems, key=_last_time)
    return f"{latest['reason']}: {latest.get('message', '')}".strip(": ")


def _last_time(event: Mapping[str, Any]) -> str:
    """Return when the event occurred last, as RFC 3339 text in UTC, which sorts by time."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((time for time in times if time), default=event["metadata"].get("creationTimestamp") or "")
