"""Tests of the table of open connections."""

from __future__ import annotations

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.listening import ConnectionState, ConnectionTable, Cut

LIMITS = ServerConfig(header_timeout_seconds=10 / 0.95, body_timeout_seconds=30 / 0.95, write_timeout_seconds=20)


class FakeConnection:
    """Connection that records why it was closed."""

    def __init__(self, now: float, *, serving: bool = False) -> None:
        self.state = ConnectionState(now)
        if serving:
            self.state.begin_request(now)
            self.state.complete_request(now, answered=False)
        self.reason: Cut | None = None
        self.unsent = 0

    def unsent_bytes(self) -> int:
        return self.unsent

    def cut(self, reason: Cut) -> None:
        self.reason = reason


def test_sweep_closes_overdue_connections() -> None:
    table = ConnectionTable("public", LIMITS, 10)
    old, new = FakeConnection(0), FakeConnection(5)
    assert table.add(old)
    assert table.add(new)
    table.sweep(10)
    assert old.reason is None
    table.sweep(10.1)
    assert (old.reason, new.reason) == (Cut.HEADERS_LATE, None)


def test_sweep_closes_connections_that_do_not_read() -> None:
    table = ConnectionTable("public", LIMITS, 10)
    deaf = FakeConnection(0, serving=True)
    deaf.unsent = 100
    table.add(deaf)
    for now in range(21):
        table.sweep(now)
    assert deaf.reason is None
    table.sweep(20.1)
    assert deaf.reason is Cut.UNREAD


def test_connection_without_a_request_makes_place_at_the_bound() -> None:
    table = ConnectionTable("public", LIMITS, 2)
    served, half_open, new = FakeConnection(0, serving=True), FakeConnection(1), FakeConnection(2)
    assert table.add(served)
    assert table.add(half_open)
    assert table.add(new)
    assert (served.reason, half_open.reason, len(table)) == (None, Cut.DISPLACED, 2)


def test_connection_is_refused_while_all_are_served() -> None:
    table = ConnectionTable("public", LIMITS, 1)
    served = FakeConnection(0, serving=True)
    table.add(served)
    assert not table.add(FakeConnection(1))
    table.remove(served)
    assert table.add(FakeConnection(2))
