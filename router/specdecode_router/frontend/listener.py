"""The listening socket of the router, and the limit of open files."""

from __future__ import annotations

import logging
import resource
import socket

from specdecode_router.errors import CannotStart

log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that wait to be accepted."""
_OTHER_FILES = 256


def raise_file_limit(max_connections: int) -> None:
    """Allow as many open files as clients and as many streams to workers need."""
    needed = 2 * max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        log.warning("%d connections need %d open files, and the limit is %d (ulimit -n)", max_connections, needed, soft)


def bind(host: str, port: int, scheme: str) -> socket.socket:
    """Return the listening socket. Raises CannotStart if the port cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    log.info("router port: %s://%s:%d", scheme, *listener.getsockname()[:2])
    return listener
