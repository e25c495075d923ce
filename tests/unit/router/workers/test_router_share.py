"""Shares of routers: together the whole when all are busy, never more than is free when they borrow, never nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdecode_router.workers.router_share import RouterShare

COUNTS = st.integers(1, 12)


def shares(routers: int, turn: int = 0) -> list[RouterShare]:
    return [RouterShare(routers, rank, turn) for rank in range(routers)]


@given(routers=COUNTS, total=st.integers(0, 200), turn=st.integers(0, 50))
def test_busy_routers_have_all_places_and_no_more(routers: int, total: int, turn: int) -> None:
    own = [one.places(total, lendable=0, own=0, used=0) for one in shares(routers)]
    assert sum(own) == (max(total, routers) if total else 0)
    assert max(own) - min(own) <= 1
    full = [one.places(total, lendable=total, own=had, used=sum(own))
            for one, had in zip(shares(routers, turn), own, strict=True)]  # fmt: skip
    assert full == own


@given(routers=COUNTS, total=st.integers(1, 200), turn=st.integers(0, 50), data=st.data())
def test_borrowers_take_together_what_is_free(routers: int, total: int, turn: int, data: st.DataObject) -> None:
    own = data.draw(st.lists(st.integers(0, total), min_size=routers, max_size=routers))
    used = sum(own)
    places = [one.places(total, lendable=total, own=had, used=used)
              for one, had in zip(shares(routers, turn), own, strict=True)]  # fmt: skip
    certain = [one.places(total, lendable=0, own=0, used=0) for one in shares(routers)]
    assert all(may >= sure for may, sure in zip(places, certain, strict=True))
    beyond = sum(max(may - max(had, sure), 0) for may, had, sure in zip(places, own, certain, strict=True))
    assert beyond <= max(total - used, 0)


@given(routers=st.integers(2, 12), total=st.integers(1, 200), rank=st.integers(0, 11))
def test_a_router_with_all_clients_comes_to_have_all_places(routers: int, total: int, rank: int) -> None:
    own = 0
    for turn in range(12 * routers):
        own = RouterShare(routers, rank % routers, turn).places(total, lendable=total, own=own, used=own)
        assert own <= total or own == 1
    assert own == max(total, 1)


def test_a_borrower_gives_back_when_the_others_get_clients() -> None:
    own = 30
    for turn in range(20):
        own = RouterShare(3, 0, turn).places(30, lendable=24, own=own, used=own + 20)
    assert own == 10
