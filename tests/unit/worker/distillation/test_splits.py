"""Splits are stable, have the intended sizes and share no passage."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_worker.capture import opening_hash
from specdecode_worker.training.distillation.records import (
    NGRAM_TOKENS,
    Split,
    Text,
    exclusive_runs,
    frames,
    overlapping,
    runs_of,
    shares_run,
    split_of,
    union_of_runs,
)


def test_splits_are_stable() -> None:
    """Splits are the same as when the drafts in use were trained. If this test fails, fix the code and not the test."""
    assert opening_hash("What is tea?") == "6d2fe14f37383968"
    apart = {i: split for i in range(17) if (split := split_of(opening_hash(f"question {i}"))) != "train"}
    assert apart == {3: "test", 7: "validation", 9: "validation", 13: "test", 16: "validation"}


def test_whitespace_does_not_change_the_split() -> None:
    assert opening_hash(" What\n is  tea? ") == opening_hash("What is tea?") != opening_hash("What is Tea?")


def test_split_shares_match_the_constants() -> None:
    counts = Counter(split_of(opening_hash(f"question {i}")) for i in range(20_000))
    assert abs(counts["test"] - 2000) < 200
    assert abs(counts["validation"] - 2000) < 200
    assert counts.total() == 20_000


@given(st.lists(st.integers(0, 50_000), max_size=60), st.integers(1, 15))
@settings(max_examples=100, deadline=None)
def test_run_hashes_equal_python_sets_of_windows(tokens: list[int], size: int) -> None:
    length = min(size, len(tokens))
    wanted = {tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)} if tokens else set()
    assert len(runs_of(tokens, size)) == len(wanted)
    if tokens:
        assert shares_run(runs_of(tokens, size), runs_of([*tokens, 7], size)) == (len(tokens) >= size)


def test_run_hash_depends_on_token_order() -> None:
    assert not shares_run(runs_of(range(13)), runs_of(range(12, -1, -1)))


texts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.sampled_from(["train", "validation", "test"])),
    max_size=30,
)


@given(texts, st.lists(st.integers(0, 3), max_size=20))
@settings(max_examples=100, deadline=None)
def test_no_run_occurs_in_two_splits(rows: list[tuple[list[int], Split]], judged: list[int]) -> None:
    made = [Text(str(i), "d", (), runs_of(answer)) for i, (answer, _) in enumerate(rows)]
    splits = [split for _, split in rows]
    golden = runs_of(judged)
    dropped = overlapping(made, splits, golden)
    runs_by_split = {
        split: union_of_runs([t.answer for t, s, d in zip(made, splits, dropped, strict=True) if s == split and not d])
        for split in ("train", "validation", "test")
    }
    parts = [*runs_by_split.values(), golden]
    assert not any(shares_run(a, b) for i, a in enumerate(parts) for b in parts[:i])
    for text, split, drop in zip(made, splits, dropped, strict=True):
        others = [golden, *(runs_by_split[s] for s in runs_by_split if s != split)]
        assert not drop or any(shares_run(text.answer, other) for other in others), "nothing is dropped for nothing"
    if not len(golden):
        assert not any(d for d, s in zip(dropped, splits, strict=True) if s == "test"), "test stays whole"


def test_chat_template_frame_is_not_an_overlap() -> None:
    system = list(range(100, 140))
    made = [
        Text(
            str(i),
            "d",
            [*system, *range(1000 * i, 1000 * i + 20)],
            runs_of(range(90_000 * i, 90_000 * i + 30)),
        )
        for i in range(2, 12)
    ]
    splits: list[Split] = ["test", "train"] * 5
    assert not any(overlapping(made, splits))
    assert len(frames(made)["d"]) == len(system) - NGRAM_TOKENS + 1
    assert all(len(exclusive_runs(text, frames(made))) == 1 + (20 - 12) + (30 - 12) for text in made)


def test_the_same_question_in_two_splits_is_an_overlap() -> None:
    asked = list(range(20))
    made = [Text(str(i), "d", asked if i < 2 else range(90 * i, 90 * i + 20), runs_of([i])) for i in range(9)]
    splits: list[Split] = ["train", "test", *["train"] * 7]  # type: ignore[list-item]
    assert overlapping(made, splits) == [True] + [False] * 8


def test_short_common_start_after_the_frame_is_not_an_overlap() -> None:
    system, form = list(range(100, 140)), list(range(50, 60))
    others = [[*system, *range(2000 + 90 * i, 2012 + 90 * i)] for i in range(30)]
    similar = [[*system, *form, 1, 2], [*system, *form, 3, 2], [*system, *form, 3, 2]]
    made = [Text(str(i), "d", prompt, runs_of([7000 + i])) for i, prompt in enumerate([*similar, *others])]
    splits: list[Split] = ["train", "test", "train", *["test"] * 30]  # type: ignore[list-item]
    assert overlapping(made, splits) == [False, False, True] + [False] * 30


def test_run_hashes_do_not_collide() -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 20_000)
    assert len(runs_of(tokens.tolist())) == 20_000 - NGRAM_TOKENS + 1
