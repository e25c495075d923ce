"""Tests of tool call parsing: the result is the same for every split of the text into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import ToolFormat
from specdecode_worker.server.tools.deltas import ArgumentsDelta, CallStart, Delta, TextDelta
from specdecode_worker.server.tools.parser_choice import format_of, parser_for

FUNCTIONS = ["weather", "now"]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo }", "days": [1, {"a": "\\""}]}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
ANN = '{"name": "Ann", "parameters": {}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'


def read(name: ToolFormat, pieces: Iterable[str], *, ended: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the (function, arguments) of each call; those that are certain if the text goes on."""
    parser = parser_for(name, FUNCTIONS)
    deltas: list[Delta] = [delta for piece in pieces for delta in parser.push(piece)]
    deltas += parser.end() if ended else []
    content, calls = "", []
    for delta in deltas:
        match delta:
            case TextDelta(text):
                assert text, "an empty delta says nothing"
                content += text
            case CallStart(function):
                calls.append((function, ""))
            case ArgumentsDelta(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


OSLO = '{"city": "Oslo }", "days": [1, {"a": "\\""}]}'
CASES: dict[str, tuple[ToolFormat, str, str, list[tuple[str, str]]]] = {
    "no call": ("hermes", "Just text. \n", "Just text. \n", []),
    "a call": ("hermes", HERMES, "", [("weather", OSLO)]),
    "text, then a call": ("hermes", f"Let me see.\n\n{HERMES}\n", "Let me see.", [("weather", OSLO)]),
    "two calls": ("hermes", f"{HERMES}\n{NOW}", "", [("weather", OSLO), ("now", "{}")]),
    "text after a call": ("hermes", f"{NOW} done", " done", [("now", "{}")]),
    "arguments first": (
        "hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", '{"a": 1}')],
    ),
    "arguments as a text": (
        "hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    "no closing tag": ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [("now", "{}")]),
    "cut short": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ', "", [("now", '{"a": ')]),
    "cut before it is a call": ("hermes", 'x <tool_call>{"na', 'x <tool_call>{"na', []),
    "no JSON": ("hermes", "a <tool_call>nonsense</tool_call> b", "a <tool_call>nonsense</tool_call> b", []),
    "no call within": ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "a tag in garbage": ("hermes", f"<tool_call>no {NOW}", "<tool_call>no", [("now", "{}")]),
    "part of a tag": ("hermes", "1 <tool and <tool_ca", "1 <tool and <tool_ca", []),
    "a name not offered": (
        "hermes", '<tool_call>{"name": "later", "arguments": {}}</tool_call>', "", [("later", "{}")],
    ),
    "llama: a call": ("llama3_json", LLAMA, "", [("weather", '{"city": "Oslo"}')]),
    "llama: with its tag": ("llama3_json", f"<|python_tag|>{LLAMA}", "", [("weather", '{"city": "Oslo"}')]),
    "llama: with a type": (
        "llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")],
    ),
    "llama: two": ("llama3_json", f"{LLAMA}; {LLAMA}", "", [("weather", '{"city": "Oslo"}')] * 2),
    "llama: text": ("llama3_json", "It is {cold}.", "It is {cold}.", []),
    "llama: JSON that was asked for": ("llama3_json", ANN, ANN, []),
    "llama: other JSON": ("llama3_json", ' {"a": [1]} and', ' {"a": [1]} and', []),
    "llama: text after a call": ("llama3_json", LLAMA + " so", " so", [("weather", '{"city": "Oslo"}')]),
    "llama: begins like its tag": ("llama3_json", "<|py", "<|py", []),
    "pythonic: calls": (
        "pythonic", "[weather(city='Oslo', days=[1, 2]), now()]", "",
        [("weather", '{"city": "Oslo", "days": [1, 2]}'), ("now", "{}")],
    ),
    "pythonic: a list": ("pythonic", "[1, 2]", "[1, 2]", []),
    "pythonic: text": ("pythonic", "one [two]", "one [two]", []),
    "pythonic: not offered": ("pythonic", "[later()]", "[later()]", []),
    "pythonic: no literal": ("pythonic", "[now(a=open('x'))]", "[now(a=open('x'))]", []),
    "pythonic: broken": ("pythonic", "[now(", "[now(", []),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES.values(), ids=CASES)
def test_calls_are_parsed_and_other_text_is_preserved(
    name: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(name, [text]) == (content, calls)
    assert read(name, text) == (content, calls), "a letter at a time"


@given(case=st.sampled_from(sorted(CASES)), cuts=st.sets(st.integers(1, 120)))
def test_parsing_does_not_depend_on_piece_boundaries(case: str, cuts: set[int]) -> None:
    name, text, _, _ = CASES[case]
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert read(name, pieces) == read(name, [text])


@given(case=st.sampled_from(sorted(CASES)), cuts=st.sets(st.integers(1, 120)), length=st.integers(0, 150))
def test_output_so_far_does_not_depend_on_piece_boundaries(case: str, cuts: set[int], length: int) -> None:
    name, text, _, _ = CASES[case]
    begin = text[:length]
    edges = [0, *sorted(cut for cut in cuts if cut < len(begin)), len(begin)]
    pieces = [begin[start:end] for start, end in itertools.pairwise(edges)]
    assert read(name, pieces, ended=False) == read(name, begin, ended=False), "another worker replays letter by letter"


@given(name=st.sampled_from(["hermes", "llama3_json", "pythonic"]), text=st.text(alphabet='<tool_ca/>{}[]":, n1'))
def test_text_without_a_call_is_unchanged(name: ToolFormat, text: str) -> None:
    content, calls = read(name, text)
    if not calls:
        assert content == text


def test_arguments_are_streamed() -> None:
    parser = parser_for("hermes", FUNCTIONS)
    assert parser.push('<tool_call>{"name": "now", "argu') == []
    assert parser.push('ments": {"a"') == [CallStart("now"), ArgumentsDelta('{"a"')]
    assert parser.push(": 1}") == [ArgumentsDelta(": 1}")]
    assert parser.push("}</tool_call>") == []


def test_tool_format_is_derived_from_the_template() -> None:
    assert format_of("...<tool_call></tool_call>...") == "hermes"
    assert format_of('respond in {"name": function name, "parameters": dictionary}') == "llama3_json"
    assert format_of("[func_name1(params_name1=params_value1), func_name2(params)]") == "pythonic"
    assert format_of("nothing") is None
