"""Tests of tool call parsing: the result is the same for every split of the text into pieces."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import ToolFormat
from specdecode_worker.models.chat_template import ChatTemplate
from specdecode_worker.server.requests import ChatRequest
from specdecode_worker.server.tools import (
    CallReader,
    Delta,
    WrittenCall,
    format_of,
    other_format_of,
    parser_for,
)

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
        if isinstance(delta, WrittenCall):
            calls.append((delta.name, delta.arguments))
        else:
            assert delta, "an empty delta says nothing"
            content += delta
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
    "cut short": ("hermes", *['<tool_call>{"name": "now", "arguments": {"a": '] * 2, []),
    "no last brace": (
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}\n</tool_call>\nIt is late.', "\nIt is late.",
        [("now", '{"a": 1}')],
    ),
    "no last brace, cut": ("hermes", '<tool_call>{"name": "now", "arguments": {}', "", [("now", "{}")]),
    "no arguments, cut": ("hermes", '<tool_call>{"name": "now"', '<tool_call>{"name": "now"', []),
    "a brace too many": ("hermes", NOW.replace("}}", "}}}") + " so", " so", [("now", "{}")]),
    "two braces missing": (
        "hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": {{"b": 1}}</tool_call>{NOW}',
        '<tool_call>{"name": "now", "arguments": {"a": {"b": 1}</tool_call>', [("now", "{}")],
    ),
    "null": ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    "an empty text": ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [("now", "{}")]),
    "a list": ("hermes", *[NOW.replace("{}", '[]')] * 2, []),
    "a word": ("hermes", *[NOW.replace("{}", '"noon"')] * 2, []),
    "a bare word": ("hermes", *[NOW.replace("{}", '{"a": noon}')] * 2, []),
    "NaN": ("hermes", *[NOW.replace("{}", '{"a": NaN}')] * 2, []),
    "a raw newline": (
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": "b\n\tc"}}</tool_call>', "",
        [("now", '{"a": "b\\n\\tc"}')],
    ),
    "half a surrogate pair": ("hermes", *[NOW.replace("{}", '{"a": "\\ud800"}')] * 2, []),
    "another order": (
        "hermes", '<tool_call>{"arguments": {"a": "\\u00e9"}, "name": "now"}</tool_call>', "", [("now", '{"a": "é"}')],
    ),
    "another key": ("hermes", *[NOW.replace('arguments": {}', 'age": 5')] * 2, []),
    "a name that no history may have": ("hermes", *[NOW.replace("now", "a b")] * 2, []),
    "llama: null": ("llama3_json", '{"name": "now", "parameters": null}', "", [("now", "{}")]),
    "llama: another key": ("llama3_json", *['{"name": "now", "age": 5}'] * 2, []),
    "llama: a list": ("llama3_json", *['{"name": "now", "parameters": [1]}'] * 2, []),
    "llama: cut short": ("llama3_json", *['{"name": "now", "parameters": {"a": "b'] * 2, []),
    "llama: a tag": ("llama3_json", *['{"name": "now", "parameters": {"a": <b>}} so'] * 2, []),
    "pythonic: names of JSON": (
        "pythonic", "[now(a=true, b=[null, false])]", "", [("now", '{"a": true, "b": [null, false]}')],
    ),
    "pythonic: infinite": ("pythonic", "[now(a=1e999)]", "[now(a=1e999)]", []),
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
    "pythonic: Llama 4": ("pythonic", "<|python_start|>[now(a=1)]<|python_end|>\n", "", [("now", '{"a": 1}')]),
    "pythonic: no end marker": ("pythonic", " <|python_start|> [now()]", "", [("now", "{}")]),
    "pythonic: no start marker": ("pythonic", "[now()] <|python_end|>", "", [("now", "{}")]),
    "pythonic: text between markers": ("pythonic", *["<|python_start|>print(1)<|python_end|>"] * 2, []),
    "pythonic: cut marker": ("pythonic", *["<|python_st"] * 2, []),
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


def test_what_is_read_again_behind_a_tag_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    text, pushed, push = "<tool_call>" * 2000, 0, CallReader.push

    def counting(reader: CallReader, piece: str) -> list[Delta]:
        nonlocal pushed
        pushed += len(piece)
        return push(reader, piece)

    monkeypatch.setattr(CallReader, "push", counting)
    assert read("hermes", [text]) == (text, [])
    assert pushed < 30 * len(text)


def test_other_arguments_wait_for_the_end_of_their_call() -> None:
    parser = parser_for("hermes", FUNCTIONS)
    assert parser.push('<tool_call>{"name": "now", "arguments": {"a": 1}') == []
    assert parser.push("}") == [WrittenCall("now", '{"a": 1}')]


PIECES = (
    *("<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', "'", ",", ":", "\\", "\n", "\x00", " ", "<", ";", ")"),
    *("null", "NaN", "1e999", "-1", "true", "\\ud800", "é", "now", "weather(", "now(a=1)", "<|python_tag|>"),
    *("<|python_start|>", "<|python_end|>"),
    *("name", "parameters", "arguments", '{"name": "now", "', '": {"a": ', NOW, LLAMA),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python's parser, about escapes
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic"])
def test_random_outputs_are_calls_or_text(name: ToolFormat) -> None:
    """No output is lost, and every message can be sent back: 10,000 mutated calls, at random splits."""
    key = "parameters" if name == "llama3_json" else "arguments"
    template = items_template()
    for seed in range(10_000):
        draw = random.Random(f"{name} {seed}")
        marks = [f"w{draw.randrange(10**9)}w" for _ in range(4)]
        arguments = draw.choice(['{"a": "MARK"}', '{"a": [1, {"b": "MARK"}]}', "null"]).replace("MARK", marks[0])
        call = f'{{"name": "now", "{key}": {arguments}}}'
        whole = {
            "hermes": f"{marks[1]}<tool_call>\n{call}\n</tool_call>{marks[2]}",
            "llama3_json": f"{call}{draw.choice(['', f'; {call}', marks[1]])}",
            "pythonic": draw.choice(("{}", "<|python_start|>{}<|python_end|>")).format(f"[now(a='{marks[0]}', b=[1])]"),
        }[name]
        text = mutated(draw, whole, marks[3]) if draw.random() < 0.9 else whole
        cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(6))))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        content, calls = read(name, pieces)
        assert (content, calls) == read(name, [text]), text
        shown = content + "".join(function + arguments for function, arguments in calls)
        assert all(mark in shown for mark in marks if mark in text), text
        assert calls or content == text
        for _, arguments in calls:
            assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict), text
        message = {"role": "assistant", "content": content or None, "tool_calls": [
            {"id": "c", "type": "function", "index": index, "function": {"name": function, "arguments": written}}
            for index, (function, written) in enumerate(calls)]}  # fmt: skip
        earlier = ChatRequest.model_validate({"model": "m", "messages": [message, {"role": "user", "content": "x"}]})
        assert template.render([one.rendered() for one in earlier.messages]).encode()


def mutated(draw: random.Random, text: str, mark: str) -> str:
    """Return a text with some of its parts cut out, repeated, exchanged or followed by other pieces."""
    for _ in range(draw.randrange(1, 4)):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice((0, 0, 1, 1, 2, 5)))
        piece = draw.choice((*PIECES, mark, text[start : start + 9], ""))
        text = text[:start] + piece + text[end:]
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.2 else text


def items_template() -> ChatTemplate:
    return ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}"
        "{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}{% endfor %}{% endfor %}", {}
    )  # fmt: skip


def test_tool_format_is_derived_from_the_template() -> None:
    assert format_of("...<tool_call></tool_call>...") == "hermes"
    assert format_of('respond in {"name": function name, "parameters": dictionary}') == "llama3_json"
    assert format_of("[func_name1(params_name1=params_value1), func_name2(params)]") == "pythonic"
    assert format_of("nothing") is None


def test_formats_without_a_parser_are_named() -> None:
    """Qwen3-Coder's template has the tags of Hermes around XML."""
    coder = "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert (format_of(coder), other_format_of(coder)) == (None, "qwen3_coder")
    assert (format_of("[TOOL_CALLS]"), other_format_of("[TOOL_CALLS]")) == (None, "mistral")
    assert other_format_of('<tool_call>{"name": NAME}</tool_call>') is None
