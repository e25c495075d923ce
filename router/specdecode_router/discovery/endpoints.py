"""Conversion of EndpointSlices to endpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specdecode_router.workers.worker import Endpoint


def endpoints_of(slices: Iterable[Mapping[str, Any]], port: str) -> tuple[Endpoint, ...]:
    """Return the workers of a Service in the order of their names.

    A worker that is neither ready nor terminating is left out. One that two slices list, while Kubernetes moves it from
    one to the other or because it has addresses of two families, is returned once: ready before terminating, IPv4
    before IPv6.

    Args:
        slices: EndpointSlices of the Service.
        port: Name of the port of the admin API. If another port is called https, all of them serve HTTPS.
    """
    by_name: dict[str, Endpoint] = {}
    for one in sorted(slices, key=lambda one: str(one.get("addressType"))):
        for endpoint in _endpoints(one, port):
            known = by_name.get(endpoint.name)
            if known is None or (known.terminating and not endpoint.terminating):
                by_name[endpoint.name] = endpoint
    return tuple(by_name[name] for name in sorted(by_name))


def _endpoints(one: Mapping[str, Any], port: str) -> Iterator[Endpoint]:
    ports = {item.get("name"): item.get("port") for item in one.get("ports") or ()}
    number = ports.get(port)
    if number is None:
        return
    scheme = "https" if "https" in ports else "http"
    for item in one.get("endpoints") or ():
        conditions = item.get("conditions") or {}
        terminating = bool(conditions.get("terminating"))
        # Absent means ready: the API says so of an unknown state.
        ready = conditions.get("ready") is not False
        addresses = item.get("addresses") or ()
        if addresses and (ready or terminating):
            # All addresses of an endpoint are of the same pod.
            host = f"[{addresses[0]}]" if one.get("addressType") == "IPv6" else addresses[0]
            name = (item.get("targetRef") or {}).get("name") or addresses[0]
            yield Endpoint(name, f"{scheme}://{host}:{number}", terminating=terminating)
