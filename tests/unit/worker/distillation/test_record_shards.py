"""Selection of records: counts of dropped records by reason, limits, the texts that replay may use, and splits."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_worker.capture import Record, opening_hash
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.training.conversations import Conversation, write_shard
from specdecode_worker.training.distillation.judge import exclude_overlapping, runs_of_samples, text_of
from specdecode_worker.training.distillation.pool import read_pool
from specdecode_worker.training.distillation.records import (
    NGRAM_TOKENS,
    CaptureSelection,
    Runs,
    Split,
    Text,
    exclusive_runs,
    frames,
    overlapping,
    prepare_shards,
    runs_of,
    select_records,
    shares_run,
    split_of,
    union_of_runs,
)
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.evaluation import Sample
from specdecode_worker.training.recipe import VALIDATION_CONVERSATIONS

SIZE = 50_000


def record(number: int, **changes: object) -> Record:
    generator = torch.Generator().manual_seed(number)
    made = Record(
        tokens=tuple(torch.randint(0, SIZE, (60,), generator=generator).tolist()),
        prompt_length=30,
        sampling=Sampling(max_tokens=30, seed=0, temperature=0.0),
        target="t",
        task="a",
        time_seconds=float(number),
        opening=opening_hash(f"question {number}"),
    )
    return msgspec.structs.replace(made, **changes)


def source(*, oldest_seconds: float = 0.0, judged: Runs | None = None, most_tokens: int = 10**9) -> CaptureSelection:
    return CaptureSelection((), "t", 1000, oldest_seconds=oldest_seconds, judged=judged, most_tokens=most_tokens)


def test_dropped_records_are_counted_by_reason() -> None:
    records = [record(i) for i in range(100)]
    records += [record(101, target="u"), record(102, prompt_length=59, tokens=record(102).tokens[:60])]
    records += [record(103, tokens=record(0).tokens), record(104, prompt_length=60)]
    summary, chosen = select_records(records, source(oldest_seconds=10.0, judged=runs_of(record(50).tokens[20:])), SIZE)
    assert summary.records == 104
    assert summary.dropped == {"other_target": 1, "too_short": 1, "malformed": 1, "too_old": 10, "overlaps": 1}
    assert len(chosen) == 104 - 14
    assert summary.window_seconds == (10.0, 103.0)


def test_record_from_the_future_does_not_supersede_the_others() -> None:
    records = [record(i) for i in range(20)] + [record(99, time_seconds=1e12)]
    few = msgspec.structs.replace(records[0], share=1e-12)
    selection = dataclasses.replace(source(most_tokens=6000), newest_seconds=1000.0)
    summary, chosen = select_records([*records, few], selection, SIZE)
    assert summary.dropped["in_future"] == 1
    assert summary.dropped["malformed"] == 1
    assert max(one.time_seconds for one in chosen) < 100


def test_copy_of_a_test_text_is_not_used_for_training() -> None:
    splits = {split: [i for i in range(60) if split_of(record(i).opening) == split] for split in ("test", "train")}
    tested, trained = splits["test"][0], splits["train"][0]
    answer = record(tested).tokens[30:]
    copied = record(trained, tokens=(*record(trained).tokens[:30], *answer))
    summary, chosen = select_records([record(tested), copied, record(splits["train"][1])], source(), SIZE)
    assert summary.dropped == {"overlaps": 1}
    assert copied not in chosen
    assert record(tested) in chosen


def test_newest_records_fill_the_token_budget() -> None:
    records = [record(i) for i in range(400)]
    summary, chosen = select_records(records, source(most_tokens=6000), SIZE)
    counts = Counter(split_of(one.opening) for one in chosen)
    assert counts == {"train": 100, "validation": 13, "test": 25}
    assert summary.dropped == {"superseded": 400 - 138}
    oldest = min(one.time_seconds for one in chosen if split_of(one.opening) == "train")
    assert all(one in chosen for one in records if one.time_seconds > oldest and split_of(one.opening) == "train")
    assert [one.time_seconds for one in chosen] == sorted(one.time_seconds for one in chosen)


def test_data_hash_depends_on_the_selected_records_only() -> None:
    records = [record(i) for i in range(20)]
    first, _ = select_records(records, source(), SIZE)
    assert select_records(records[::-1], source(), SIZE)[0].sha256 == first.sha256, "in whatever order workers wrote it"
    assert select_records(records[1:], source(), SIZE)[0].sha256 != first.sha256


def conversation(number: int, *, domain: str = "old", temperature: float = 0.0) -> Conversation:
    tokens = torch.tensor(record(number).tokens, dtype=torch.int32)
    return Conversation(tokens, torch.zeros(60, 6), torch.zeros(60, 2), 30, temperature, domain)


def sample(number: int) -> Sample:
    return Sample(record(number), conversation(number))


def test_replayed_text_does_not_overlap_evaluation_texts() -> None:
    judged = runs_of_samples([sample(i) for i in range(5)])
    pool = [conversation(i) for i in range(3, 12)]
    assert exclude_overlapping(pool, judged) == pool[2:]
    assert len(text_of("x", pool[0]).answer) == 30 - 12


def test_replay_pool_reads_the_parent_training_text(tmp_path: Path) -> None:
    recorded = tmp_path / "train" / "recorded"
    recorded.mkdir(parents=True)
    for shard in range(10):
        write_shard(recorded, shard, [conversation(100 * shard + i) for i in range(40)])
    pool = read_pool([tmp_path / "train"], most_tokens=10**9)
    assert 0 < len(pool.validation) <= VALIDATION_CONVERSATIONS
    validated = {tuple(c.tokens_N.tolist()) for c in pool.validation}
    assert not any(tuple(c.tokens_N.tolist()) in validated for c in pool.training)
    assert len(pool.training) + len(pool.validation) == 400
    assert len(read_pool([tmp_path / "train"], most_tokens=2400).training) < 80, "no more shards than wanted are read"


def test_replay_pool_excludes_the_test_split_of_the_parent(tmp_path: Path) -> None:
    splits = {"train": range(10), "validation": range(10, 14), "test": range(14, 20)}
    for split, numbers in splits.items():
        folder = tmp_path / "parent" / "data" / split
        folder.mkdir(parents=True)
        write_shard(folder, 0, [conversation(i) for i in numbers])
    pool = read_pool([tmp_path / "parent"], most_tokens=10**9)
    assert (len(pool.training), len(pool.validation), {one.domain for one in pool.training}) == (10, 4, {"old"})
    with pytest.raises(TrainingError, match="--out"):
        read_pool([tmp_path], most_tokens=1)


def test_run_that_goes_on_deletes_the_list_that_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"records": 7}))
    (tmp_path / "selected.records").write_bytes(b"text of all selected records")
    summary = prepare_shards(None, source(), tmp_path, print, lambda: False)  # type: ignore[arg-type]
    assert summary.records == 7
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


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
        Text(str(i), "d", [*system, *range(1000 * i, 1000 * i + 20)], runs_of(range(90_000 * i, 90_000 * i + 30)))
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
