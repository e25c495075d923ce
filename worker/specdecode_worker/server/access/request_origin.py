"""Checks against web pages that call the admin port through a user's browser.

A page can reach loopback under a name of its own (DNS rebinding) or send requests across origins. The header ``Host``
reveals the first, the header ``Origin`` the second.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Container
from urllib.parse import urlsplit


def is_own_host(host: str, own_names: Container[str]) -> bool:
    """Return whether ``host`` names this worker: an IP address, ``localhost`` or one of its names.

    A page cannot choose any of these for its own address, whereas every DNS name may be under control of an attacker.

    Args:
        host: Value of the header ``Host``, with or without a port.
        own_names: Names of this worker in lower case.
    """
    try:
        parts = urlsplit(f"//{host}")
        name = parts.hostname
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        return False
    if not name or parts.netloc != host or "@" in host:
        return False
    return name == "localhost" or name in own_names or _is_address(name)


def is_own_origin(origin: str, host: str) -> bool:
    """Return whether a request with these headers ``Origin`` and ``Host`` comes from a page of this worker itself."""
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
