"""Tests of the conversion of EndpointSlices to endpoints, with literal slices."""

from __future__ import annotations

from typing import Any

from specdecode_router.discovery.endpoints import endpoints_of
from specdecode_router.workers.worker import Endpoint

PORTS = [{"name": "http", "port": 8000}, {"name": "admin", "port": 8001}]


def endpoint(name: str | None, address: str, **conditions: bool | None) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": name}} if name else {}
    return {"addresses": [address], "conditions": conditions, **target}


def one_slice(*endpoints: dict[str, Any], family: str = "IPv4", ports: Any = PORTS) -> dict[str, Any]:
    return {"metadata": {"name": "s"}, "addressType": family, "ports": ports, "endpoints": list(endpoints) or None}


def test_ready_workers_are_listed_by_name() -> None:
    slices = [one_slice(endpoint("b", "10.0.0.2", ready=True), endpoint("a", "10.0.0.1", ready=True))]
    assert endpoints_of(slices, "admin") == (
        Endpoint("a", "http://10.0.0.1:8001"),
        Endpoint("b", "http://10.0.0.2:8001"),
    )


def test_a_worker_without_conditions_is_ready() -> None:
    assert endpoints_of([one_slice(endpoint("a", "10.0.0.1"))], "admin") == (Endpoint("a", "http://10.0.0.1:8001"),)
    assert endpoints_of([one_slice(endpoint("a", "10.0.0.1", ready=None))], "admin")


def test_an_unready_worker_is_left_out_and_a_leaving_one_is_marked() -> None:
    loading = endpoint("a", "10.0.0.1", ready=False, serving=False, terminating=False)
    leaving = endpoint("b", "10.0.0.2", ready=False, serving=True, terminating=True)
    assert endpoints_of([one_slice(loading, leaving)], "admin") == (
        Endpoint("b", "http://10.0.0.2:8001", terminating=True),
    )


def test_a_worker_in_two_slices_is_listed_once() -> None:
    leaving = one_slice(endpoint("a", "10.0.0.1", ready=False, terminating=True))
    ready = one_slice(endpoint("a", "10.0.0.1", ready=True))
    for slices in ([leaving, ready], [ready, leaving]):
        assert endpoints_of(slices, "admin") == (Endpoint("a", "http://10.0.0.1:8001"),)


def test_ipv4_is_preferred_and_ipv6_is_bracketed() -> None:
    six = one_slice(endpoint("a", "fd00::1", ready=True), family="IPv6")
    four = one_slice(endpoint("a", "10.0.0.1", ready=True))
    assert endpoints_of([six, four], "admin") == (Endpoint("a", "http://10.0.0.1:8001"),)
    assert endpoints_of([six], "admin") == (Endpoint("a", "http://[fd00::1]:8001"),)


def test_a_public_port_called_https_means_tls() -> None:
    ports = [{"name": "https", "port": 8000}, {"name": "admin", "port": 8001}]
    assert endpoints_of([one_slice(endpoint("a", "10.0.0.1"), ports=ports)], "admin")[0].admin_url == (
        "https://10.0.0.1:8001"
    )


def test_slices_without_the_port_or_without_endpoints_are_empty() -> None:
    assert endpoints_of([one_slice(endpoint("a", "10.0.0.1"), ports=[{"name": "http", "port": 8000}])], "admin") == ()
    assert endpoints_of([one_slice(), one_slice(ports=None)], "admin") == ()
    assert endpoints_of([], "admin") == ()


def test_an_endpoint_without_a_pod_is_named_by_its_address() -> None:
    assert endpoints_of([one_slice(endpoint(None, "192.0.2.7"))], "admin")[0].name == "192.0.2.7"
