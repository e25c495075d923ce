"""Source of workers and writer of held requests, as the settings ask for them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping

from specdecode_router.discovery.api_server import ApiServer
from specdecode_router.discovery.demand import DemandWriter
from specdecode_router.discovery.endpoint_slices import Discovery, EndpointSliceDiscovery
from specdecode_router.discovery.joined import JoinedDiscovery
from specdecode_router.discovery.static import StaticDiscovery
from specdecode_router.settings import RouterSettings
from specdecode_worker.contract import Env


@contextlib.asynccontextmanager
async def open_sources(settings: RouterSettings) -> AsyncIterator[tuple[Discovery, DemandWriter | None]]:
    """Yield the source of workers, and the writer of held requests where there is an operator.

    Raises:
        CannotStart: The API server is not known.
    """
    if settings.namespace is None or settings.service is None:
        others: dict[str, Discovery] = {one.name: StaticDiscovery(one.workers) for one in settings.backends}
        yield _joined(settings, StaticDiscovery(settings.workers), others), None
        return
    api = await ApiServer.connect()
    try:
        demand = None
        if settings.demand_config_map is not None:
            name = os.environ.get(Env.pod_name) or socket.gethostname()
            demand = DemandWriter(api, settings.namespace, settings.demand_config_map, name)
        others = {
            one.name: EndpointSliceDiscovery(api, settings.namespace, one.service)
            if one.service
            else StaticDiscovery(one.workers)
            for one in settings.backends
        }
        yield _joined(settings, EndpointSliceDiscovery(api, settings.namespace, settings.service), others), demand
    finally:
        await api.close()


def _joined(settings: RouterSettings, own: Discovery, others: Mapping[str, Discovery]) -> Discovery:
    return JoinedDiscovery(settings.deployment, {settings.deployment: own, **others}) if others else own
