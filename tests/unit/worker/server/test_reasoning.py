"""Tests of the separation of thinking from the answer: the result is the same for every split of the text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import ReasoningFormat
from specdecode_worker.server.responses import (
    ChatWriter,
    ChoicePiece,
    ChoiceStatistics,
    FinishedChoice,
    ResponseContext,
    ToolCallOptions,
)
from specdecode_worker.server.tools import ReasoningParser, Tokenizer, parser_for, reasoning_parser
from support.published.tokens import tokenizer_of

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


def read(inside: bool, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(inside=inside)
    read = [parser.push(piece) for piece in pieces] + [parser.push("", last=True)]
    return "".join(thought for thought, _ in read), "".join(answer for _, answer in read)


@given(case=st.sampled_from(sorted(CASES)), cuts=st.sets(st.integers(0, 30)))
def test_thinking_is_separated_at_any_split(case: str, cuts: set[int]) -> None:
    inside, text, thought, answer = CASES[case]
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert read(inside, [text[start:end] for start, end in itertools.pairwise(edges)]) == (thought, answer)


@given(inside=st.booleans(), text=st.text(alphabet="</think>a \n"))
def test_no_output_is_lost(inside: bool, text: str) -> None:
    thought, answer = read(inside, list(text))
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
