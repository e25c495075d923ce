"""OpenAI's objects, read by OpenAI's own client library."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from specdecode_worker.server.answers import ChatFormat, Choice, CompletionFormat, Statistics, event, metrics, usage

STATISTICS = Statistics(prompt_tokens=3, completion_tokens=10, cached_tokens=2, drafts=4, draft_tokens=12, accepted=6)
CHOICE = Choice("text", "stop", STATISTICS)


def test_statistics_add_up_over_choices() -> None:
    assert usage([STATISTICS, STATISTICS])["total_tokens"] == 26
    assert metrics([STATISTICS])["speculative_decoding"] == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.5,
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
    }


def test_plain_decoding_has_one_token_a_step() -> None:
    plain = Statistics(3, 10, 0, 0, 0, 0)
    assert metrics([plain])["speculative_decoding"]["mean_acceptance_length"] == 1.0


def test_whole_answers_have_openais_shape() -> None:
    chat = ChatCompletion.model_validate(ChatFormat("m").whole([CHOICE]), strict=True)
    assert (chat.choices[0].message.content, chat.usage and chat.usage.total_tokens) == ("text", 13)
    completion = Completion.model_validate(CompletionFormat("m").whole([CHOICE, CHOICE]), strict=True)
    assert [choice.index for choice in completion.choices] == [0, 1]


def test_chunks_of_a_stream_have_openais_shape() -> None:
    form = ChatFormat("m")
    opening = form.opening(0)
    assert opening is not None
    chunks = [opening, form.chunk(0, "a", None), form.chunk(0, "", "stop"), form.closing([STATISTICS])]
    read = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert [chunk.choices[0].delta.content for chunk in read[:3]] == ["", "a", None]
    assert read[2].choices[0].finish_reason == "stop"
    assert (read[3].choices, read[3].usage and read[3].usage.prompt_tokens) == ([], 3)
    assert len({chunk.id for chunk in read}) == 1
    assert CompletionFormat("m").opening(0) is None


@pytest.mark.parametrize("text", ["two\n\nlines", "é", '"', "\u2028"])
def test_an_event_is_one_frame_whatever_the_text(text: str) -> None:
    frame = event({"text": text})
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    assert json.loads(frame.removeprefix(b"data: "))["text"] == text
