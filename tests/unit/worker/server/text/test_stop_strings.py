"""Tests of stop strings: the cut is the same for every split of the text into pieces."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.server.tools import StopFinder

letters = st.text(alphabet="ab", max_size=12)


@given(text=letters, stop=st.text(alphabet="ab", min_size=1, max_size=4), cuts=st.sets(st.integers(0, 12)))
def test_text_is_cut_at_the_first_stop_string(text: str, stop: str, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    finder = StopFinder((stop,))
    shown = ""
    for start, end in itertools.pairwise(edges):
        shown += finder.push(text[start:end])
        assert stop not in shown
    if finder.matched is None:
        shown += finder.flush()
    assert shown == text.partition(stop)[0]
    assert (finder.matched == stop) == (stop in text)


@given(early=letters, text=letters, stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_a_stop_string_may_begin_where_none_may_end(early: str, text: str, stop: str) -> None:
    finder = StopFinder((stop,))
    shown = "".join(finder.push(letter, may_end=False) for letter in early)
    shown += "".join(finder.push(letter) for letter in text)
    whole = early + text
    ends = [end for end in range(len(early) + 1, len(whole) + 1) if whole[:end].endswith(stop)]
    assert finder.matched == (stop if ends else None)
    assert shown + finder.flush() == (whole[: ends[0] - len(stop)] if ends else whole)


@given(text=letters, stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_only_a_possible_stop_prefix_is_held_back(text: str, stops: list[str]) -> None:
    finder = StopFinder(tuple(stops))
    shown = "".join(finder.push(letter) for letter in text)
    if finder.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(text=letters, stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_stop_string_that_begins_first_in_a_piece_ends_the_text(text: str, stops: list[str]) -> None:
    finder = StopFinder(tuple(stops))
    shown = finder.push(text)
    begins = [text.find(stop) for stop in stops if stop in text]
    assert shown + finder.flush() == (text[: min(begins)] if begins else text)


def test_work_grows_with_the_text_alone() -> None:
    count = 400_000
    finder = StopFinder((" " * count + "x",))
    began = time.process_time()
    assert finder.push(" " * count) == ""
    assert finder.push("y") == " " * count + "y"
    assert time.process_time() - began < 1, "every length of the held text was compared"


def test_an_empty_stop_string_raises() -> None:
    with pytest.raises(AssertionError):
        StopFinder(("",))
