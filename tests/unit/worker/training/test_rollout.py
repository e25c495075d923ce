"""Rollouts record the text that the target's engine produces, with the target's states, and cut loops.

However many tokens are recorded, only a part of their states is held at a time.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.capture import Record
from specdecode_worker.engine.engine import Engine
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.training import rollout
from specdecode_worker.training.conversations import Conversation, DataSet, batches, read_shard, shard_paths
from specdecode_worker.training.distillation.records import chunks_of, read_samples, write_samples
from specdecode_worker.training.errors import PromptFileError
from specdecode_worker.training.evaluation import Sample
from specdecode_worker.training.prompts import Question
from specdecode_worker.training.recipe import RecordingSettings, record_answers
from specdecode_worker.training.rollout import (
    LOOP_COUNT,
    LOOP_NGRAM,
    GeneratedText,
    OpenConversation,
    Rollout,
    RolloutSettings,
    answer_tokens,
    read_states,
    read_texts,
    record_states,
    record_texts,
    texts_paths,
)
from specdecode_worker.training.split_target import TargetPlacement, target_engine
from specdecode_worker.training.unroll import make_batch
from support.training_fixtures import Letters

SETTINGS = RolloutSettings(rows=10, question_tokens=40, answer_tokens=24, for_training=False)


def asked(count: int) -> list[Question]:
    generator = torch.Generator().manual_seed(5)
    lengths = [3 + i % 7 for i in range(count)]
    return [Question(tuple(torch.randint(1, 64, (n,), generator=generator).tolist()), 0.0, "qa") for n in lengths]


def plain_greedy(target: CausalLM, ids: tuple[int, ...], count: int) -> list[int]:
    tokens = list(ids)
    while len(tokens) - len(ids) < count:
        _, hidden = read_states(target, torch.tensor(tokens))
        token = int(target.logits(hidden[-1]).argmax())
        if token in target.config.eos_token_ids:
            break
        tokens.append(token)
    return tokens


@pytest.fixture
def engine(placement: TargetPlacement) -> Iterator[Engine]:
    with target_engine(placement, rows=10, longest=64) as engine:
        yield engine


def test_greedy_rollout_equals_plain_decoding(engine: Engine, target: CausalLM) -> None:
    """One answer after the other ends, and another question takes its place."""
    questions = asked(24)
    texts = list(Rollout(engine, SETTINGS, iter(questions)).texts())
    expected = [plain_greedy(target, q.ids or (), SETTINGS.answer_tokens - 1) for q in questions]
    expected = [tokens for q, tokens in zip(questions, expected, strict=True) if len(tokens) > len(q.ids or ())]
    assert sorted(list(text.tokens) for text in texts) == sorted(expected)
    assert engine.idle


def test_recorded_states_equal_one_pass_over_the_text(engine: Engine, target: CausalLM, tmp_path: Path) -> None:
    record_texts(Rollout(engine, SETTINGS, iter(asked(12))).texts(), tmp_path, tokens=10**6, log=print, shard_tokens=90)
    record_states(target, tmp_path, print)
    texts = [text for path in texts_paths(tmp_path) for text in read_texts(path)]
    conversations = [c for path in shard_paths(tmp_path) for c in read_shard(path)]
    assert len(shard_paths(tmp_path)) > 1
    for text, conversation in zip(texts, conversations, strict=True):
        assert tuple(conversation.tokens_N.tolist()) == text.tokens
        assert (conversation.answer_start, conversation.domain) == (text.answer_start, "qa")
        aux, hidden = read_states(target, conversation.tokens_N.long())
        torch.testing.assert_close(conversation.aux_NA, aux, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(conversation.hidden_NE, hidden, atol=1e-5, rtol=1e-4)


def test_self_asked_questions_are_wrapped_in_the_chat_template(engine: Engine) -> None:
    def forever() -> Iterator[Question]:
        while True:
            yield Question(None, 0.8, "self-asked")

    settings = RolloutSettings(rows=4, question_tokens=20, answer_tokens=24, for_training=False)
    asked: list[list[int]] = []

    def is_refused(question: list[int]) -> bool:
        asked.append(question)
        return len(asked) % 3 == 0

    rollout = Rollout(engine, settings, forever(), around=([1, 2], [3, 4]), is_refused=is_refused)
    for _, text in zip(range(12), rollout.texts(), strict=False):
        assert text.tokens[:2] == (1, 2)
        assert text.tokens[text.answer_start - 2 : text.answer_start] == (3, 4)
        assert text.answer_start <= 20
    assert len(asked) >= 12 * 3 // 2, "every third question was refused and replaced"
    assert all(len(question) == 20 - 2 - 2 - 1 for question in asked), "a question ends before its last token"


def test_a_prompt_without_room_for_an_answer_is_refused_by_its_length(engine: Engine) -> None:
    rollout = Rollout(engine, SETTINGS, iter([Question(tuple(range(1, 65)), 0.0, "qa")]))
    with pytest.raises(PromptFileError, match=r"a prompt of 64 tokens leaves no room .* takes 64 tokens here"):
        list(rollout.texts())


def test_an_answer_may_fill_the_context(engine: Engine) -> None:
    settings = RolloutSettings(rows=1, answer_tokens=1000, for_training=False)
    (text,) = Rollout(engine, settings, iter([Question((5, 6, 7), 1.0, "qa")])).texts()
    assert len(text.tokens) == 63, "the last token is left out"


def test_answer_is_cut_where_it_loops() -> None:
    row = OpenConversation(Question((9,), 0.0, "qa"), [9], answer_start=1)
    period = list(range(LOOP_NGRAM))
    said = 0
    for token in period * (LOOP_COUNT + 1):
        said += 1
        if row.repeats_with(token):
            break
        row.tokens.append(token)
    assert said == LOOP_NGRAM * LOOP_COUNT


def test_answer_that_does_not_loop_is_not_cut() -> None:
    row = OpenConversation(Question((9,), 0.0, "qa"), [9], answer_start=1)
    for token in (*range(LOOP_NGRAM), *range(500), *range(LOOP_NGRAM)):
        assert not row.repeats_with(token)
        row.tokens.append(token)


def test_repetition_in_the_prompt_is_not_a_loop() -> None:
    period = list(range(LOOP_NGRAM))
    row = OpenConversation(Question(None, 0.0, "qa"), period * 3, answer_start=3 * LOOP_NGRAM)
    assert not any(row.repeats_with(token) or row.tokens.append(token) for token in period * 2)


def test_recording_resumes_at_the_next_shard(engine: Engine, target: CausalLM, tmp_path: Path) -> None:
    def record(tokens: int) -> None:
        record_texts(Rollout(engine, SETTINGS, iter(asked(12))).texts(), tmp_path, tokens=tokens, log=print)
        record_states(target, tmp_path, print)

    record(10**6)
    first = answer_tokens(tmp_path)
    assert first > 0
    record(first)
    assert answer_tokens(tmp_path) == first, "enough was there"
    record(first + 1)
    assert answer_tokens(tmp_path) > first
    assert [path.name for path in shard_paths(tmp_path)] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert all(c.domain == "qa" for path in shard_paths(tmp_path) for c in read_shard(path))


def test_recording_of_a_text_resumes_behind_its_last_piece(placement: TargetPlacement, tmp_path: Path) -> None:
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_text("The quick brown fox jumps over the lazy dog.")
    for tokens in (12, 24):
        recording = RecordingSettings(tokens=tokens, text=path, answer_tokens=4)
        record_answers(placement, Letters(), recording, 0, out, print)  # type: ignore[arg-type]
    texts = [text for recorded in texts_paths(out / "recorded") for text in read_texts(recorded)]
    assert [chr(token) for text in texts for token in text.tokens] == list("The quick brown fox jumps over t")


def test_text_that_is_too_short_is_refused_by_its_name(placement: TargetPlacement, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    recording = RecordingSettings(tokens=12, text=path)
    with pytest.raises(PromptFileError, match=r"empty\.txt is too short"):
        record_answers(placement, Letters(), recording, 0, tmp_path / "out", print)  # type: ignore[arg-type]


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

    with pytest.raises(KeyboardInterrupt):
        write_samples(tmp_path / "golden", broken(), shard_tokens=1)
    assert not (tmp_path / "golden").exists()
    write_samples(tmp_path / "golden", [next(samples())], shard_tokens=1)
    assert len(list(read_samples(tmp_path / "golden"))) == 1


def test_chunks_of_records_are_bounded_by_tokens_and_complete() -> None:
    one = next(samples()).record
    records = [one] * 70
    assert [len(chunk) for chunk in chunks_of(records)] == [32, 32, 6]
    assert [len(chunk) for chunk in chunks_of(records, most_tokens=10 * len(one.tokens))] == [10] * 7
    assert list(chunks_of([])) == []
