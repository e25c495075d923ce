"""Tests of the seeds of the choices of a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.server.admission import seeds_of

seeds = st.integers(-(2**63), 2**63 - 1)


@given(seed=seeds, count=st.integers(1, 128))
def test_seeds_are_distinct_and_start_with_the_requests_seed(seed: int, count: int) -> None:
    choice_seeds = seeds_of(seed, count)
    assert choice_seeds[0] == seed % 2**63
    assert len(set(choice_seeds)) == count
    assert all(0 <= one < 2**63 for one in choice_seeds)


@given(seed=seeds)
def test_seeds_do_not_depend_on_the_number_of_choices(seed: int) -> None:
    assert seeds_of(seed, 8)[:3] == seeds_of(seed, 3)


@given(seed=st.integers(0, 2**62))
def test_adjacent_seeds_give_independent_streams(seed: int) -> None:
    assert not set(seeds_of(seed, 16)) & set(seeds_of(seed + 1, 16))


def test_missing_seed_is_drawn_at_random() -> None:
    assert seeds_of(None, 2) != seeds_of(None, 2)
