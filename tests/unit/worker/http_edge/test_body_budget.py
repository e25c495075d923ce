"""Tests of the bound of arriving bodies."""

from __future__ import annotations

from specdecode_worker.http_edge import BodyBudget, BodyReservation


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
