"""Memory of states: however many tokens are recorded, only a part of them is held at a time."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.capture import Record
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.training import rollout
from specdecode_worker.training.conversations import Conversation, DataSet, batches, read_shard, shard_paths
from specdecode_worker.training.distillation.records import chunks_of, read_samples, write_samples
from specdecode_worker.training.evaluation import Sample
from specdecode_worker.training.rollout import GeneratedText, record_states, record_texts
from specdecode_worker.training.unroll import make_batch

WIDTH, TOKENS, TEXTS = 4096, 64, 200
STATE_MIB = 4 * WIDTH * 2 * TOKENS * TEXTS / 2**20
"""States of all texts: 400 MiB."""
BOUND_MIB = 100


class PeakMemory:
    """Peak of the process's anonymous memory during a block, above its start, in MiB."""

    def __enter__(self) -> PeakMemory:
        self._stop, self._first, self._peak = threading.Event(), _anonymous_mib(), 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, _anonymous_mib())

    @property
    def mib(self) -> float:
        return self._peak - self._first


def _anonymous_mib() -> float:
    matching = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert matching
    return int(matching[1]) / 1024


def conversations() -> Iterator[Conversation]:
    for number in range(TEXTS):
        tokens_N = torch.full((TOKENS,), number, dtype=torch.int32)
        aux_NA = torch.full((TOKENS, 3 * WIDTH), float(number), dtype=torch.bfloat16)
        yield Conversation(tokens_N, aux_NA, aux_NA[:, :WIDTH].clone(), 4, 0.0, "a")


def samples() -> Iterator[Sample]:
    for conversation in conversations():
        tokens = (*conversation.tokens_N.tolist(), 0)
        sampling = Sampling(max_tokens=9, seed=0, temperature=0.0)
        made = Record(
            tokens=tokens, prompt_length=4, sampling=sampling, target="t", task="a", time_seconds=0.0, opening="o"
        )
        yield Sample(made, conversation)


@pytest.mark.slow
def test_recorded_states_are_written_and_read_within_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = ((one.aux_NA, one.hidden_NE) for one in conversations())
    monkeypatch.setattr(rollout, "read_states", lambda target, tokens_N: next(states))
    texts = (GeneratedText(tuple(one.tokens_N.tolist()), 4, 0.0, "a") for one in conversations())
    with PeakMemory() as peak:
        write_samples(tmp_path / "samples", samples(), shard_tokens=512)
        record_texts(texts, tmp_path / "recorded", tokens=TEXTS * TOKENS // 2, log=print, shard_tokens=512)
        record_states(None, tmp_path / "recorded", print)  # type: ignore[arg-type]
        data = DataSet(tmp_path / "recorded", validation=8)
        data.grow()
        seen = 0.0
        for group in batches(data.training, tokens=512, seed=0, epoch=0):
            seen += float(make_batch(group, torch.bfloat16).aux_BLA.float().amax())
        stored = list(read_samples(tmp_path / "samples"))
        total = sum(float(one.conversation.aux_NA[0, 0]) for one in stored)
    assert seen > 0
    assert (len(stored), total) == (TEXTS, sum(range(TEXTS)))
    assert STATE_MIB == 400
    assert peak.mib < BOUND_MIB


def test_shards_of_any_size_hold_the_same_samples_in_order(tmp_path: Path) -> None:
    few = [sample for _, sample in zip(range(9), samples(), strict=False)]
    for name, size in (("small", 64), ("large", 10**6)):
        write_samples(tmp_path / name, few, shard_tokens=size)
    small, large = (list(read_samples(tmp_path / name)) for name in ("small", "large"))
    assert [one.record for one in small] == [one.record for one in large] == [one.record for one in few]
    for one, other in zip(small, large, strict=True):
        assert torch.equal(one.conversation.aux_NA, other.conversation.aux_NA)
        assert torch.equal(one.conversation.hidden_NE, other.conversation.hidden_NE)
    assert (len(shard_paths(tmp_path / "small")), len(shard_paths(tmp_path / "large"))) == (9, 1)
    assert [c.domain for c in read_shard(shard_paths(tmp_path / "small")[0])] == ["a"]


def test_killed_write_leaves_no_folder(tmp_path: Path) -> None:
    def broken() -> Iterator[Sample]:
        yield next(samples())
        raise KeyboardInterrupt

    try:
        write_samples(tmp_path / "golden", broken(), shard_tokens=1)
    except KeyboardInterrupt:
        assert not (tmp_path / "golden").exists()
    write_samples(tmp_path / "golden", [next(samples())], shard_tokens=1)
    assert len(list(read_samples(tmp_path / "golden"))) == 1


def test_chunks_of_records_are_bounded_by_tokens_and_complete() -> None:
    one = next(samples()).record
    records = [one] * 70
    assert [len(chunk) for chunk in chunks_of(records)] == [32, 32, 6]
    assert [len(chunk) for chunk in chunks_of(records, most_tokens=10 * len(one.tokens))] == [10] * 7
    assert list(chunks_of([])) == []
