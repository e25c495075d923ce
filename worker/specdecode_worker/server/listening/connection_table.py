"""Table of the open connections of one port: closes those that are overdue, and the oldest ones beyond the bound."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from specdecode_worker.server.listening.connection_state import ConnectionState, Cut, Phase, TimeLimits

SWEEP_SECONDS = 0.2
"""Interval of the sweeps. One over 2,000 connections takes a millisecond."""

log = logging.getLogger(__name__)


class Connection(Protocol):
    """Connection that the table can close."""

    state: ConnectionState

    def unsent_bytes(self) -> int:
        """Return the size of the output that the transport still holds."""
        ...

    def cut(self, reason: Cut) -> None:
        """Close the connection."""
        ...


class ConnectionTable:
    """Open connections of one port, at most ``max_connections``, in the order in which they were accepted."""

    def __init__(self, port_name: str, limits: TimeLimits, max_connections: int) -> None:
        self._port_name, self._limits, self._max = port_name, limits, max_connections
        # The values of a dict are not used; unlike a set, it keeps the order.
        self._connections: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> bool:
        """Add a new connection. Return False if there is no place for it; the caller then refuses it.

        At the bound, the connection that has waited longest without a complete request makes place. Half-open
        connections therefore displace each other and not the clients that are served.
        """
        if len(self._connections) >= self._max:
            oldest = _longest_without_request(self._connections)
            if oldest is None:
                return False
            self.remove(oldest)
            self._log({Cut.DISPLACED: 1})
            oldest.cut(Cut.DISPLACED)
        self._connections[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._connections.pop(connection, None)

    def sweep(self, now: float) -> None:
        """Close all connections that are overdue."""
        reasons: Counter[Cut] = Counter()
        for connection in list(self._connections):
            connection.state.observe_unsent(connection.unsent_bytes(), now)
            reason = connection.state.overdue(now, self._limits)
            if reason is not None:
                reasons[reason] += 1
                connection.cut(reason)
        self._log(reasons)

    def _log(self, reasons: dict[Cut, int]) -> None:
        for reason, count in reasons.items():
            if reason is not Cut.IDLE:
                log.info("%s port: closed %d connections: %s", self._port_name, count, reason.value)


def _longest_without_request(connections: Iterable[Connection]) -> Connection | None:
    waiting = (one for one in connections if one.state.phase is not Phase.SERVING)
    return min(waiting, key=lambda one: one.state.since, default=None)
