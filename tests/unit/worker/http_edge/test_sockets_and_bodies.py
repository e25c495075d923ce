"""Sockets, and the bound of arriving bodies."""

from __future__ import annotations

import socket

import pytest

from specdecode_worker.http_edge import BodyBudget, BodyReservation, listen


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_the_wildcard_of_ipv6_serves_ipv4_too() -> None:
    """`--host ::` accepts connections over IPv4 and IPv6."""
    with listen("::", 0, 8) as listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1]), timeout=5).close()
    with listen("::1", 0, 8) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5)


def test_bodies_share_the_budget_and_return_it() -> None:
    budget = BodyBudget(100)
    with BodyReservation(budget) as first, BodyReservation(budget) as second:
        assert first.grow(60)
        assert not second.grow(41)
        assert second.exceeded
        assert first.grow(40)
    assert budget.held_bytes == 0


def test_body_beyond_the_budget_holds_nothing_more() -> None:
    budget = BodyBudget(100)
    with BodyReservation(budget) as body:
        assert body.grow(90)
        assert not body.grow(20)
        assert budget.held_bytes == 0
        assert not body.grow(1), "part of the body is lost"
