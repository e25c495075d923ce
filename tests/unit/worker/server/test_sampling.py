"""Tests of the seeds of the choices of a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.server.request_sampling import seeds_of

seeds = st.integers(-(2**63), 2**63 - 1)


@given(seed=seeds, count=st.integers(1, 128))
def test_the_first_seed_is_the_requests_and_none_comes_twice(seed: int, count: int) -> None:
    found = seeds_of(seed, count)
    assert found[0] == seed % 2**63
    assert len(set(found)) == count
    assert all(0 <= one < 2**63 for one in found)


@given(seed=seeds)
def test_more_choices_change_none_of_the_others(seed: int) -> None:
    assert seeds_of(seed, 8)[:3] == seeds_of(seed, 3)


@given(seed=st.integers(0, 2**62))
def test_neighbours_share_no_stream(seed: int) -> None:
    assert not set(seeds_of(seed, 16)) & set(seeds_of(seed + 1, 16))


def test_without_a_seed_it_is_another_one_each_time() -> None:
    assert seeds_of(None, 2) != seeds_of(None, 2)
