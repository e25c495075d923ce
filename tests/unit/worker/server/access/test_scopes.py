"""Scopes of admin tokens and requests of foreign web pages: pure tables and rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute

from specdecode_worker.contract import Route
from specdecode_worker.contract.internal_stream import INTERNAL_STREAMS
from specdecode_worker.server.admission import (
    INTERNAL_PREFIX,
    ROUTE_SCOPES,
    ReloadedSecrets,
    Scope,
    allowed_scopes,
    is_own_host,
    is_own_origin,
    prefix_salt,
)
from specdecode_worker.server.routes.admin import admin_app


def test_every_admin_route_is_in_the_table() -> None:
    app = admin_app(cast(Any, SimpleNamespace()), cast(Any, SimpleNamespace()), ReloadedSecrets("tokens", {}))
    routes = {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}
    known = {route for route in routes if not route[1].startswith(INTERNAL_PREFIX)}
    assert known <= ROUTE_SCOPES.keys(), "a route without scopes"
    assert ("POST", INTERNAL_STREAMS) in routes - known


@pytest.mark.parametrize(
    ("method", "path", "scopes"),
    [
        ("GET", Route.report, {Scope.operator}),
        ("GET", "/internal/steps", {Scope.operator, Scope.router}),
        ("POST", Route.report, {Scope.operator}),
        ("PUT", Route.draft, {Scope.operator}),
        ("POST", Route.drain, {Scope.operator}),
        ("GET", "/v1/report/", {Scope.operator}),
        ("GET", "/internal", {Scope.operator}),
        ("GET", "/anything", {Scope.operator}),
    ],
)
def test_routes_have_scopes_and_unknown_routes_are_the_operators(method: str, path: str, scopes: set[Scope]) -> None:
    assert allowed_scopes(method, path) == scopes


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:8001", True),
        ("10.1.2.3", True),
        ("[::1]:8001", True),
        ("[fe80::1]", True),
        ("localhost:8001", True),
        ("LOCALHOST", True),
        ("Pod-7:8001", True),
        ("attacker.example", False),
        ("pod-7.attacker.example", False),
        ("127.0.0.1.attacker.example", False),
        ("localhost.attacker.example", False),
        ("attacker.example@127.0.0.1", False),
        ("127.0.0.1/x", False),
        ("127.0.0.1?x", False),
        ("127.0.0.1:port", False),
        ("[::1", False),
        ("::1", False),
        ("2130706433", False),
        ("", False),
    ],
)
def test_only_addresses_and_own_names_are_own_hosts(host: str, own: bool) -> None:
    assert is_own_host(host, {"pod-7"}) == own


@pytest.mark.parametrize(
    ("origin", "own"),
    [
        ("http://127.0.0.1:8001", True),
        ("https://127.0.0.1:8001", True),
        ("http://127.0.0.1:8000", False),
        ("http://127.0.0.1", False),
        ("http://attacker.example", False),
        ("null", False),
        ("", False),
        ("ftp://127.0.0.1:8001", False),
    ],
)
def test_only_the_worker_itself_is_its_own_origin(origin: str, own: bool) -> None:
    assert is_own_origin(origin, "127.0.0.1:8001") == own


def test_salts_separate_clients_and_tenants() -> None:
    pairs = [("", "a"), ("a", ""), ("a", "b"), ("b", "a"), ("a", "b\udc80"), ('a", "b', "")]
    salts = [prefix_salt(client, salt, shared=False) for client, salt in pairs]
    assert len({*salts, ""}) == len(pairs) + 1
    assert salts == [prefix_salt(client, salt, shared=False) for client, salt in pairs]


def test_without_keys_or_with_a_shared_cache_only_the_request_salts() -> None:
    assert prefix_salt("", "", shared=False) == prefix_salt("alice", "", shared=True) == ""
    assert prefix_salt("", "", shared=True, router_salt="alice") == ""
    assert prefix_salt("", "", shared=False, router_salt="alice") != prefix_salt(
        "", "", shared=False, router_salt="bob"
    )
    assert prefix_salt("alice", "x", shared=True) == prefix_salt("bob", "x", shared=True) != ""
