"""Tests of response objects, parsed by OpenAI's own client library."""

from __future__ import annotations

import json
import math

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from specdecode_worker.core.messages import Logprobs
from specdecode_worker.server.responses import (
    ChatWriter,
    ChoicePiece,
    ChoiceStatistics,
    CompletionWriter,
    FinishedChoice,
    ResponseContext,
    ScoredToken,
    event,
    metrics,
    usage,
)
from specdecode_worker.server.tools import Tokenizer

STATISTICS = ChoiceStatistics(
    prompt_tokens=3, completion_tokens=10, cached_tokens=2, draft_tokens=12, acceptance=(1, 1, 1, 1)
)
CHOICE = FinishedChoice("text", "stop", STATISTICS)


def head(tokenizer: Tokenizer, *, logprobs: bool = False) -> ResponseContext:
    return ResponseContext("42", "m", "fp_1", tokenizer.vocabulary, logprobs)


def scored(tokenizer: Tokenizer, text: str) -> tuple[ScoredToken, ...]:
    """Return every token of ``text`` with two other tokens that are more likely."""
    ids = tokenizer.encode(text)
    return tuple(ScoredToken(i, at, Logprobs(i, -3.0, 3, (ids[0], 0), (-1.0, -math.inf))) for at, i in enumerate(ids))


def test_statistics_add_up_over_choices() -> None:
    assert usage([STATISTICS, STATISTICS])["total_tokens"] == 26
    assert metrics([STATISTICS, ChoiceStatistics(3, 10, 0, 4, (2,))], 4)["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.375,
        "acceptance_histogram": [3, 1, 1, 1, 0],
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 16,
        "num_spec_tokens": 4,
    }


def test_draft_that_is_deeper_than_the_plan_lengthens_the_histogram() -> None:
    deeper = metrics([STATISTICS], 2)["speculative_decoding"]
    assert (deeper["num_spec_tokens"], deeper["acceptance_histogram"]) == (3, [1, 1, 1, 1])


def test_prompt_tokens_count_once_for_several_choices() -> None:
    again = ChoiceStatistics(3, 10, 3, 0, (), counts_prompt=False)
    reported_usage = usage([STATISTICS, again])
    assert (reported_usage["prompt_tokens"], reported_usage["completion_tokens"]) == (3, 20)
    assert reported_usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_plain_decoding_has_one_token_per_step() -> None:
    plain = metrics([ChoiceStatistics(3, 10, 0, 0, ())], 2)["speculative_decoding"]
    assert (plain["mean_acceptance_length"], plain["acceptance_histogram"]) == (1.0, [0, 0, 0])


def test_complete_responses_match_openai(tokenizer: Tokenizer) -> None:
    chat = ChatCompletion.model_validate(ChatWriter(head(tokenizer)).whole([CHOICE]), strict=True)
    assert (chat.choices[0].message.content, chat.usage and chat.usage.total_tokens) == ("text", 13)
    assert (chat.id, chat.system_fingerprint) == ("chatcmpl-42", "fp_1")
    completion = Completion.model_validate(CompletionWriter(head(tokenizer)).whole([CHOICE, CHOICE]), strict=True)
    assert [choice.index for choice in completion.choices] == [0, 1]


def test_stream_chunks_match_openai(tokenizer: Tokenizer) -> None:
    form = ChatWriter(head(tokenizer))
    opening = form.opening(0)
    assert opening is not None
    chunks = [
        opening,
        *form.chunks(0, ChoicePiece("a", None)),
        *form.chunks(0, ChoicePiece("", "stop")),
        form.closing([STATISTICS]),
    ]
    read = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert [chunk.choices[0].delta.content for chunk in read[:3]] == ["", "a", None]
    assert read[2].choices[0].finish_reason == "stop"
    assert (read[3].choices, read[3].usage and read[3].usage.prompt_tokens) == ([], 3)
    assert len({chunk.id for chunk in read}) == 1
    assert CompletionWriter(head(tokenizer)).opening(0) is None


def test_logprobs_of_a_chat_have_bytes_and_stay_finite(tokenizer: Tokenizer) -> None:
    choice = FinishedChoice("é", "stop", STATISTICS, scored(tokenizer, "é"))
    completion = ChatCompletion.model_validate(ChatWriter(head(tokenizer, logprobs=True)).whole([choice]), strict=True)
    first, second = completion.choices[0].logprobs.content or ()
    assert bytes([*(first.bytes or ()), *(second.bytes or ())]).decode() == "é"
    assert (first.token, first.logprob) == ("\ufffd", -3.0)
    assert [(top.bytes, top.logprob) for top in first.top_logprobs] == [([0xC3], -1.0), ([0x21], -9999.0)]


def test_logprobs_of_a_completion_are_four_lists(tokenizer: Tokenizer) -> None:
    known = scored(tokenizer, "aé")
    choice = FinishedChoice("aé", "stop", STATISTICS, (ScoredToken(known[0].token, 0, None), *known[1:]))
    logprobs = CompletionWriter(head(tokenizer, logprobs=True)).whole([choice])["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [None, -3.0, -3.0]
    assert logprobs["top_logprobs"] == [
        None,
        {"a": -1.0, "!": -9999.0, "bytes:\\xc3": -3.0},
        {"a": -1.0, "!": -9999.0, "bytes:\\xa9": -3.0},
    ]
    Completion.model_validate(CompletionWriter(head(tokenizer)).whole([choice]), strict=True)


@pytest.mark.parametrize("text", ["two\n\nlines", "é", '"', "\u2028"])
def test_event_is_one_frame_for_any_text(text: str) -> None:
    frame = event({"text": text})
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    assert json.loads(frame.removeprefix(b"data: "))["text"] == text
