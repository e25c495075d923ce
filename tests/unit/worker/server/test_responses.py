"""Response objects, parsed by OpenAI's own client library, the text of a choice, and its thinking."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from specdecode_worker.contract import ReasoningFormat
from specdecode_worker.core.messages import Logprobs, Tokens
from specdecode_worker.server.generation import ChoiceOutput
from specdecode_worker.server.prompts import Prompt
from specdecode_worker.server.requests import CompletionRequest
from specdecode_worker.server.responses import (
    ChatWriter,
    ChoicePiece,
    ChoiceStatistics,
    CompletionWriter,
    FinishedChoice,
    ResponseContext,
    ScoredToken,
    ToolCallOptions,
    event,
    metrics,
    usage,
)
from specdecode_worker.server.tools import ReasoningParser, Tokenizer, parser_for, reasoning_parser
from support.published.tokens import tokenizer_of

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


END = 257
fixture_is_constant = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="p", **fields)


def read(tokenizer: Tokenizer, ids: list[int], cuts: set[int], reading: CompletionRequest) -> list[ChoicePiece]:
    """Return the pieces of ``ids`` and an end token, received in steps that are split at ``cuts``."""
    ids = [*ids, END]
    reader = ChoiceOutput(tokenizer, Prompt(()), reading, counts_prompt=True)
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    pieces = []
    for start, end in itertools.pairwise(edges):
        step = tuple(ids[start:end])
        logprobs = tuple(Logprobs(token, -float(token), 1) for token in step)
        finish = "stop" if end == len(ids) else None
        pieces.append(reader.push(Tokens(request_id="r", tokens=step, finish=finish, logprobs=logprobs)))
        if pieces[-1].finish_reason:
            break
    return pieces


@given(text=st.text(alphabet="abé你"), cuts=st.sets(st.integers(1, 30)), stop=st.sampled_from(["", "b", "ab", "éa"]))
@fixture_is_constant
def test_output_does_not_depend_on_step_sizes(tokenizer: Tokenizer, text: str, cuts: set[int], stop: str) -> None:
    reading = request(stop=[stop] if stop else [], logprobs=0)
    pieces = read(tokenizer, tokenizer.encode(text), cuts, reading)
    shown = "".join(piece.text for piece in pieces)
    assert shown == (text.partition(stop)[0] if stop else text)
    scored = [one for piece in pieces for one in piece.scored]
    assert tokenizer.decode([one.token for one in scored]) == shown
    assert [one.offset for one in scored] == [i for i, letter in enumerate(shown) for _ in letter.encode()]
    assert all(one.logprobs is not None and one.logprobs.token == one.token for one in scored)


def test_logprobs_wait_for_the_text_that_a_stop_string_holds_back(tokenizer: Tokenizer) -> None:
    reading = request(stop=["abX"], logprobs=0)
    pieces = read(tokenizer, tokenizer.encode("1abc"), {1, 2, 3, 4}, reading)
    assert [(piece.text, len(piece.scored)) for piece in pieces] == [("1", 1), ("", 0), ("", 0), ("abc", 3), ("", 0)]


def test_output_that_ends_within_a_character_shows_that_something_was_there(tokenizer: Tokenizer) -> None:
    *beginning, _ = tokenizer.encode("a你")
    reader = ChoiceOutput(tokenizer, Prompt(()), request(), counts_prompt=True)
    pieces = [reader.push(Tokens(request_id="r", tokens=(token,), finish=None)) for token in beginning[:-1]]
    last = reader.push(Tokens(request_id="r", tokens=(beginning[-1],), finish="length"))
    assert "".join(piece.text for piece in pieces) == "a"
    assert (last.text, last.finish_reason) == ("\ufffd", "length")


CASES = {
    "inside": (True, "so\n</think>\n\nHello", "so\n", "\n\nHello"),
    "inside, with its tag": (True, "\n<think>so</think>Hello", "so", "Hello"),
    "outside": (False, " <think>\nso</think>Hello", "\nso", "Hello"),
    "an answer alone": (False, "Hello <think>no</think>", "", "Hello <think>no</think>"),
    "cut short": (True, "so much </thi", "so much </thi", ""),
    "cut short, outside": (False, "<think>so", "so", ""),
    "begins like the tag": (False, " <thin ice", "", " <thin ice"),
    "the tag alone": (False, "<thin", "", "<thin"),
    "nothing": (True, "", "", ""),
    "nothing thought": (True, "</think>Hello", "", "Hello"),
    "twice": (True, "a</think>b</think>c", "a", "b</think>c"),
}


def separated(inside: bool, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(inside=inside)
    separated = [parser.push(piece) for piece in pieces] + [parser.push("", last=True)]
    return "".join(thought for thought, _ in separated), "".join(answer for _, answer in separated)


@given(case=st.sampled_from(sorted(CASES)), cuts=st.sets(st.integers(0, 30)))
def test_thinking_is_separated_at_any_split(case: str, cuts: set[int]) -> None:
    inside, text, thought, answer = CASES[case]
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert separated(inside, [text[start:end] for start, end in itertools.pairwise(edges)]) == (thought, answer)


@given(inside=st.booleans(), text=st.text(alphabet="</think>a \n"))
def test_no_output_is_lost(inside: bool, text: str) -> None:
    thought, answer = separated(inside, list(text))
    begin = text.lstrip()
    begun = inside or begin.startswith("<think>")
    whole = begin.removeprefix("<think>") if begin.startswith("<think>") else text
    assert thought + answer == (whole.replace("</think>", "", 1) if begun else text)


@pytest.mark.parametrize(
    ("name", "prompt", "thought"),
    [
        ("deepseek_r1", "<|start|>assistant\n", "a"),
        ("deepseek_r1", "<|start|>assistant\n<think>\n", "a"),
        ("deepseek_r1", "<think>\n\n</think>\n\n", ""),
        ("qwen3", "<|start|>assistant\n", ""),
        ("qwen3", "<|start|>assistant\n<think>\n", "a"),
        ("qwen3", "<think>\n\n</think>\n\n", ""),
    ],
)
def test_the_end_of_the_prompt_says_whether_the_answer_begins_with_thinking(
    name: ReasoningFormat, prompt: str, thought: str
) -> None:
    tokenizer = Tokenizer(tokenizer_of("text"), None)
    made = reasoning_parser(name, tokenizer, tokenizer.encode(prompt))
    assert made().push("a</think>b", last=True)[0] == thought
    assert made().push("<think>a</think>b", last=True) == ("a", "b")


def writer(tools: ToolCallOptions | None = None) -> ChatWriter:
    tokenizer = Tokenizer(tokenizer_of("text"), None)
    context = ResponseContext("r", "m", "f", tokenizer.vocabulary, logprobs=False)
    made = ChatWriter(context, tools, lambda prompt: reasoning_parser("deepseek_r1", tokenizer, prompt))
    made.begin([])
    return made


TEXT = '<think>\nso</think>\n\nI call.<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def test_messages_have_thinking_apart_from_calls() -> None:
    tools = ToolCallOptions(lambda: parser_for("hermes", ["now"]))
    statistics = ChoiceStatistics(1, 1, 0, 0, ())
    (choice,) = writer(tools).whole([FinishedChoice(TEXT, "stop", statistics)])["choices"]
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    streamed = writer(tools)
    assert streamed.holds_back_text
    chunks = [streamed.chunks(0, ChoicePiece(letter, None)) for letter in TEXT]
    for chunk in itertools.chain(*chunks, streamed.chunks(0, ChoicePiece("", "stop"))):
        delta = chunk["choices"][0]["delta"]
        assert not {"reasoning_content", "content"} <= delta.keys()
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        message["tool_calls"] += [part for part in delta.get("tool_calls", ()) if "id" in part]
    for one in (choice["message"], message):
        assert (one["reasoning_content"], one["content"]) == ("\nso", "\n\nI call.")
        assert [call["function"]["name"] for call in one["tool_calls"]] == ["now"]
    (thinking,) = writer().whole([FinishedChoice("<think>so", "length", statistics)])["choices"]
    assert (thinking["message"]["content"], thinking["message"]["reasoning_content"]) == (None, "so")
