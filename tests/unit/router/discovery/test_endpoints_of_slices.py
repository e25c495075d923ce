"""Tests of the conversion of EndpointSlices to endpoints, with literal slices."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_router.discovery.endpoints import endpoints_of
from specdecode_router.workers.worker import Endpoint

PORTS = [{"name": "http", "port": 8000}, {"name": "admin", "port": 8001}]


def endpoint(name: str | None, address: str, **conditions: bool | None) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": name}} if name else {}
    return {"addresses": [address], "conditions": conditions, **target}


def one_slice(*endpoints: dict[str, Any], family: str = "IPv4", ports: Any = PORTS) -> dict[str, Any]:
    return {"metadata": {"name": "s"}, "addressType": family, "ports": ports, "endpoints": list(endpoints) or None}


A, B = Endpoint("a", "http://10.0.0.1:8001"), Endpoint("b", "http://10.0.0.2:8001")
READY = one_slice(endpoint("a", "10.0.0.1", ready=True))
IPV6 = one_slice(endpoint("a", "fd00::1", ready=True), family="IPv6")
LOADING = endpoint("a", "10.0.0.1", ready=False, serving=False, terminating=False)
LEAVING = endpoint("b", "10.0.0.2", ready=False, serving=True, terminating=True)
LEAVES = one_slice(endpoint("a", "10.0.0.1", ready=False, terminating=True))
TLS = [{"name": "https", "port": 8000}, {"name": "admin", "port": 8001}]
NO_ADMIN = [{"name": "http", "port": 8000}]
CASES: dict[str, tuple[list[dict[str, Any]], tuple[Endpoint, ...]]] = {
    "ready ones by name": ([one_slice(endpoint("b", "10.0.0.2", ready=True), endpoint("a", "10.0.0.1"))], (A, B)),
    "an unknown condition": ([one_slice(endpoint("a", "10.0.0.1", ready=None))], (A,)),
    "an unready one is left out, a leaving one is marked": (
        [one_slice(LOADING, LEAVING)],
        (Endpoint("b", "http://10.0.0.2:8001", terminating=True),),
    ),
    "in two slices, one says that it leaves": ([LEAVES, READY], (A,)),
    "in two slices in the other order": ([READY, LEAVES], (A,)),
    "IPv4 is preferred": ([IPV6, READY], (A,)),
    "IPv6 is bracketed": ([IPV6], (Endpoint("a", "http://[fd00::1]:8001"),)),
    "a public port called https means TLS": (
        [one_slice(endpoint("a", "10.0.0.1"), ports=TLS)],
        (Endpoint("a", "https://10.0.0.1:8001"),),
    ),
    "without the port": ([one_slice(endpoint("a", "10.0.0.1"), ports=NO_ADMIN)], ()),
    "without endpoints": ([one_slice(), one_slice(ports=None)], ()),
    "no slices": ([], ()),
    "without a pod it is named by its address": (
        [one_slice(endpoint(None, "192.0.2.7"))],
        (Endpoint("192.0.2.7", "http://192.0.2.7:8001"),),
    ),
}


@pytest.mark.parametrize(("slices", "endpoints"), CASES.values(), ids=CASES)
def test_slices_become_endpoints(slices: list[dict[str, Any]], endpoints: tuple[Endpoint, ...]) -> None:
    assert endpoints_of(slices, "admin") == endpoints
