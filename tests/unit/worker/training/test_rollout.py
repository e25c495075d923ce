"""Rollouts record the text and states that the target itself produces, and cut loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.training.conversations import read_shard, shard_paths
from specdecode_worker.training.prompts import Question
from specdecode_worker.training.rollout import (
    LOOP_COUNT,
    LOOP_NGRAM,
    Rollout,
    RolloutSettings,
    Row,
    answer_tokens,
    read_states,
    record,
)

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


@pytest.mark.slow
def test_greedy_rollout_equals_plain_decoding(target: CausalLM) -> None:
    questions = asked(40)
    conversations = list(Rollout(target, SETTINGS, iter(questions)).conversations())
    expected = [plain_greedy(target, q.ids or (), SETTINGS.answer_tokens - 1) for q in questions]
    expected = [tokens for q, tokens in zip(questions, expected, strict=True) if len(tokens) > len(q.ids or ())]
    assert sorted(c.tokens_N.tolist() for c in conversations) == sorted(expected)


def test_recorded_states_equal_one_pass_over_the_text(target: CausalLM) -> None:
    for conversation in Rollout(target, SETTINGS, iter(asked(30))).conversations():
        aux, hidden = read_states(target, conversation.tokens_N.long())
        torch.testing.assert_close(conversation.aux_NA, aux, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(conversation.hidden_NE, hidden, atol=1e-5, rtol=1e-4)


def test_self_asked_questions_are_wrapped_in_the_chat_template(target: CausalLM) -> None:
    def forever() -> Iterator[Question]:
        while True:
            yield Question(None, 0.8, "self-asked")

    settings = RolloutSettings(rows=4, question_tokens=20, answer_tokens=24, for_training=False)
    conversations = Rollout(target, settings, forever(), around=([1, 2], [3, 4])).conversations()
    for _ in range(12):
        conversation = next(conversations)
        tokens = conversation.tokens_N.tolist()
        assert tokens[:2] == [1, 2]
        assert tokens[conversation.answer_start - 2 : conversation.answer_start] == [3, 4]
        assert conversation.answer_start <= 20


def test_answer_is_cut_where_it_loops() -> None:
    row = Row(Question((9,), 0.0, "qa"), [], answer_start=1, tokens=[9])
    period = list(range(LOOP_NGRAM))
    said = 0
    for token in period * (LOOP_COUNT + 1):
        said += 1
        if row.repeats_with(token):
            break
        row.tokens.append(token)
    assert said == LOOP_NGRAM * LOOP_COUNT


def test_answer_that_does_not_loop_is_not_cut() -> None:
    row = Row(Question((9,), 0.0, "qa"), [], answer_start=1, tokens=[9])
    for token in (*range(LOOP_NGRAM), *range(500), *range(LOOP_NGRAM)):
        assert not row.repeats_with(token)
        row.tokens.append(token)


def test_repetition_in_the_prompt_is_not_a_loop() -> None:
    period = list(range(LOOP_NGRAM))
    row = Row(Question(None, 0.0, "qa"), [], answer_start=3 * LOOP_NGRAM, tokens=period * 3)
    assert not any(row.repeats_with(token) or row.tokens.append(token) for token in period * 2)


def test_recording_resumes_at_the_next_shard(target: CausalLM, tmp_path: Path) -> None:
    said: list[str] = []
    record(Rollout(target, SETTINGS, iter(asked(20))).conversations(), tmp_path, tokens=10**6, log=said.append)
    first = answer_tokens(tmp_path)
    assert first > 0
    record(Rollout(target, SETTINGS, iter(asked(20))).conversations(), tmp_path, tokens=first, log=said.append)
    assert answer_tokens(tmp_path) == first, "enough was there"
    record(Rollout(target, SETTINGS, iter(asked(20))).conversations(), tmp_path, tokens=first + 1, log=said.append)
    assert answer_tokens(tmp_path) > first
    assert [path.name for path in shard_paths(tmp_path)] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert all(c.domain == "qa" for path in shard_paths(tmp_path) for c in read_shard(path))
