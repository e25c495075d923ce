"""Handlers of kopf: start and stop of the process, and the watch of SpecDecodeDeployments.

Only ``on.event`` is used. Timers, daemons and deletion handlers would put a finalizer on the resource, and its deletion
would hang while no operator runs. Kubernetes deletes the children through their ownerReferences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import kopf
import prometheus_client

from specdecode_operator.api.v1alpha1 import GROUP, PLURAL, VERSION
from specdecode_operator.controller.process import Process
from specdecode_operator.settings import Settings

MAX_BACKOFF_SECONDS = 10.0
"""Longest pause between two attempts of kopf to reach the API server."""
WATCH_SECONDS, SILENCE_SECONDS = 20, 25.0
"""Length of one watch request, and time without data after which a connection counts as broken."""


def register(settings: Settings) -> kopf.OperatorRegistry:
    """Return a registry with the operator's handlers."""
    registry = kopf.OperatorRegistry()
    process = Process(settings)

    async def startup(**_: Any) -> None:
        prometheus_client.start_http_server(settings.port_metrics, addr=settings.listen_address)
        await process.start()

    async def cleanup(**_: Any) -> None:
        await process.stop()

    async def changed(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        process.resource_event(type, body)

    kopf.on.login(registry=registry)(_login)
    kopf.on.startup(registry=registry)(startup)
    kopf.on.cleanup(registry=registry)(cleanup)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(changed)
    return registry


class EndlessBackoffs:
    """Pauses between attempts to reach the API server, in seconds. Endless: kopf gives up after the last one."""

    def __iter__(self) -> Iterator[float]:
        pause = 1.0
        while True:
            yield pause
            pause = min(MAX_BACKOFF_SECONDS, pause * 2)


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: no peering, no Events of kopf's own, no scan of CRDs and namespaces, short watches."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.inactivity_timeout = SILENCE_SECONDS
    return settings


def _login(**kwargs: Any) -> Any:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
