"""Tests of shadow scores: they equal the ranks that acceptance would count, without verification."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.control.plan import Score, ShadowDraft, scores

TOKENS = [9, 8, 1, 2, 3, 4, 5]
"""Tokens of a sequence. The root is at index 1; the tokens emitted after it are 1, 2, 3, 4, 5."""


def shadow(*ranked: tuple[int, ...], verified: int = 0, cut_depth: int = 99) -> ShadowDraft:
    return ShadowDraft(root=1, ranked=ranked, verified=verified, depth_limit=cut_depth)


RIGHT = ((1, 50), (2, 50), (3, 50), (4, 50))


def test_every_depth_of_a_right_path_is_a_hit() -> None:
    assert scores(shadow(*RIGHT), TOKENS) == [Score(d, 0) for d in (1, 2, 3, 4)]


@pytest.mark.parametrize(("second", "rank"), [((7, 2), 1), ((7, 6), MAX_RANKS)])
def test_scores_end_at_the_first_wrong_token(second: tuple[int, ...], rank: int) -> None:
    assert scores(shadow((1, 50), second, (3, 50)), TOKENS) == [Score(1, 0), Score(2, rank)]


def test_path_with_a_wrong_verified_token_has_no_scores() -> None:
    assert scores(shadow((7, 1), (2, 50), (3, 50), verified=1), TOKENS) == []


def test_scores_are_complete_once_their_tokens_are_known() -> None:
    assert scores(shadow(*RIGHT), TOKENS[:5]) is None
    assert scores(shadow(*RIGHT), TOKENS[:6]) is not None
    assert scores(shadow((1,), (9,), (3,), (4,)), TOKENS[:4]) == [Score(1, 0), Score(2, MAX_RANKS)]


def test_a_synthetic_cut_is_a_miss_at_its_depth() -> None:
    assert scores(shadow(*RIGHT, cut_depth=2), TOKENS) == [Score(1, 0), Score(2, 0), Score(3, MAX_RANKS)]
    assert scores(shadow(*RIGHT, cut_depth=0), TOKENS) == [Score(1, MAX_RANKS)]


@given(
    st.lists(st.permutations(range(4)).map(lambda order: tuple(order[:3])), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_verified_depths_remove_their_scores_and_change_no_others(
    ranked: list[tuple[int, ...]], tokens: list[int], verified: int, cut_depth: int
) -> None:
    everything = scores(ShadowDraft(0, tuple(ranked), 0, cut_depth), tokens)
    unverified = scores(ShadowDraft(0, tuple(ranked), verified, cut_depth), tokens)
    assert unverified == [score for score in everything if score.depth > verified]
    assert [score.rank for score in everything[:-1]] == [0] * (len(everything) - 1)
    assert all(score.rank == MAX_RANKS for score in everything if score.depth > cut_depth)
