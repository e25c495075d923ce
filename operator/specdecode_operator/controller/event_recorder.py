"""Writing of Kubernetes Events. A lost Event does no harm: status has the same history and conditions."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION
from specdecode_operator.controller.events import EventNotice
from specdecode_operator.errors import ClusterError
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import EVENTS
from specdecode_operator.times import iso
from specdecode_operator.types import Key

MAX_MESSAGE = 1024
"""Longest message of an Event, in characters."""

log = logging.getLogger(__name__)


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
