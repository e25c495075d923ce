"""Scopes of admin tokens, and the one table of the routes that each scope may call."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from specdecode_worker.contract import Route


class Scope(StrEnum):
    """Purpose of an admin token. The file of a token has the name of its scope."""

    operator = "operator"
    """Every route except the reading of captured segments, also routes that a later version adds."""
    router = "router"
    """The routes below INTERNAL_PREFIX: internal streams, and the worker's load."""
    capture = "capture"
    """Reading of captured segments, and nothing else."""


INTERNAL_PREFIX = "/internal/"
"""Paths between a router and its workers."""

_OPERATOR = frozenset({Scope.operator})
_OPERATOR_AND_ROUTER = frozenset({Scope.operator, Scope.router})
_CAPTURE = frozenset({Scope.capture})

ROUTE_SCOPES: Mapping[tuple[str, str], frozenset[Scope]] = {
    ("GET", Route.report): _OPERATOR,
    ("GET", Route.plan): _OPERATOR,
    ("PUT", Route.plan): _OPERATOR,
    ("GET", Route.draft): _OPERATOR,
    ("PUT", Route.draft): _OPERATOR,
    ("GET", Route.synthetic): _OPERATOR,
    ("PUT", Route.synthetic): _OPERATOR,
    ("DELETE", Route.synthetic): _OPERATOR,
    ("POST", Route.drain): _OPERATOR,
    ("GET", Route.captures): _CAPTURE,
    ("GET", f"{Route.captures}/{{name}}"): _CAPTURE,
    ("POST", Route.capture_deletions): _OPERATOR,
}
"""Scopes that may call each route of the admin port."""


def scope_of(name: str) -> Scope:
    """Return the scope of the admin token ``name``: the part before a slash."""
    return Scope(name.partition("/")[0])


def allowed_scopes(method: str, path: str) -> frozenset[Scope]:
    """Return the scopes that may call a route. A route that is not in the table is the operator's alone."""
    if path.startswith(INTERNAL_PREFIX):
        return _OPERATOR_AND_ROUTER
    if path.startswith(f"{Route.captures}/") and (method, path) not in ROUTE_SCOPES:
        return _CAPTURE
    return ROUTE_SCOPES.get((method, path), _OPERATOR)
