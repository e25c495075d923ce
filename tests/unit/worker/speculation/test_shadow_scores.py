"""Tests of shadow scores: they equal the ranks that acceptance would count, without verification."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.speculation.shadow_scores import Score, ShadowDraft, scores

TOKENS = [9, 8, 1, 2, 3, 4, 5]
"""Tokens of a sequence. The root is at index 1; the tokens emitted after it are 1, 2, 3, 4, 5."""


def shadow(*ranked: tuple[int, ...], verified: int = 0, kept: int = 99) -> ShadowDraft:
    return ShadowDraft(root=1, ranked=ranked, verified=verified, depth_limit=kept)


RIGHT = ((1, 50), (2, 50), (3, 50), (4, 50))


def test_every_depth_of_a_right_path_is_a_hit() -> None:
    assert scores(shadow(*RIGHT), TOKENS) == [Score(d, 0) for d in (1, 2, 3, 4)]


def test_depths_that_were_verified_are_counted_by_the_walk_alone() -> None:
    assert scores(shadow(*RIGHT, verified=2), TOKENS) == [Score(3, 0), Score(4, 0)]
    assert scores(shadow(*RIGHT, verified=4), TOKENS) == []


@pytest.mark.parametrize(("second", "rank"), [((7, 2), 1), ((7, 6), MAX_RANKS)])
def test_a_path_ends_where_the_first_token_was_wrong(second: tuple[int, ...], rank: int) -> None:
    assert scores(shadow((1, 50), second, (3, 50)), TOKENS) == [Score(1, 0), Score(2, rank)]


def test_a_path_that_left_where_it_was_verified_says_nothing_deeper() -> None:
    assert scores(shadow((7, 1), (2, 50), (3, 50), verified=1), TOKENS) == []


def test_a_score_waits_for_its_tokens_and_not_longer() -> None:
    assert scores(shadow(*RIGHT), TOKENS[:5]) is None
    assert scores(shadow(*RIGHT), TOKENS[:6]) is not None
    assert scores(shadow((1,), (9,), (3,), (4,)), TOKENS[:4]) == [Score(1, 0), Score(2, MAX_RANKS)]


def test_a_synthetic_cut_is_a_miss_at_its_depth() -> None:
    assert scores(shadow(*RIGHT, kept=2), TOKENS) == [Score(1, 0), Score(2, 0), Score(3, MAX_RANKS)]
    assert scores(shadow(*RIGHT, kept=0), TOKENS) == [Score(1, MAX_RANKS)]


@given(
    st.lists(st.permutations(range(4)).map(lambda order: tuple(order[:3])), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_verified_depths_hide_scores_and_change_none(
    ranked: list[tuple[int, ...]], tokens: list[int], verified: int, kept: int
) -> None:
    everything = scores(ShadowDraft(0, tuple(ranked), 0, kept), tokens)
    found = scores(ShadowDraft(0, tuple(ranked), verified, kept), tokens)
    assert everything is not None
    assert found == [score for score in everything if score.depth > verified]
    assert [score.rank for score in everything[:-1]] == [0] * (len(everything) - 1)
    assert all(score.rank == MAX_RANKS for score in everything if score.depth > kept)
