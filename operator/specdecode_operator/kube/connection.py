"""Connection pool to the API server: credentials, proxy, and TCP keepalive."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 3
KEEPALIVE_PROBES = 3
"""An idle connection whose peer is gone is closed after 10 + 3 * 3 = 19 seconds."""
UNACKNOWLEDGED_SECONDS = 20
"""A connection on which sent data is not acknowledged for this long is closed."""
READ_BUFFER_BYTES = 2**21
"""Events of a watch can exceed aiohttp's default buffer of 64 KiB."""


async def open_connection(kubeconfig: str | None = None) -> ApiClient:
    """Connect with the pod's service account, or else with a kubeconfig.

    Args:
        kubeconfig: Path of the file. None means the user's own, as kubectl chooses it.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    configuration.proxy = configuration.proxy or environment_proxy(configuration.host)
    api = ApiClient(configuration)
    # No limit on connections: each watch occupies one, and there is a watch per kind and namespace.
    connector = aiohttp.TCPConnector(ssl=api.rest_client.ssl_context, limit=0, socket_factory=keepalive_socket)
    # With trust_env the session would look for a proxy and a netrc file in a thread, at every request, which takes half
    # of a request's time.
    api.rest_client.pool_manager = aiohttp.ClientSession(
        connector=connector, trust_env=False, read_bufsize=READ_BUFFER_BYTES
    )
    return api


def keepalive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a TCP socket that notices a dead peer within about 20 seconds.

    Args:
        address: Address information as getaddrinfo returns it.
    """
    family, type_, protocol, *_ = address
    made = socket.socket(family=family, type=type_, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_SECONDS,
        "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_SECONDS,
        "TCP_KEEPCNT": KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": UNACKNOWLEDGED_SECONDS * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def environment_proxy(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, or None."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


async def read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length; aiohttp's own readline fails on objects beyond its buffer."""
    rest: list[bytes] = []
    async for chunk in response.content.iter_any():
        first, *others = chunk.split(b"\n")
        rest.append(first)
        for piece in others:
            line = b"".join(rest)
            rest = [piece]
            if line.strip():
                yield line
