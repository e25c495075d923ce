"""Tool calls: parsing gives the same for every split of the text into pieces, and grammars allow what parsers read."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import ToolFormat
from specdecode_worker.guided.grammars import (
    MAX_GRAMMAR_BYTES,
    GrammarCompiler,
    choice_grammar,
    json_grammar,
    regex_grammar,
)
from specdecode_worker.guided.guide import GrammarRefused
from specdecode_worker.models.chat_template import ChatTemplate
from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.grammars import AnswerGrammars, calls_within_text, forced_calls, guided_format
from specdecode_worker.server.requests import ChatRequest, FunctionDefinition
from specdecode_worker.server.tools import CallReader, Delta, WrittenCall, format_of, other_format_of, parser_for
from support.published.tokens import KINDS, TOKENS, Language

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


@given(case=st.sampled_from(sorted(CASES)), cuts=st.sets(st.integers(1, 120)), length=st.integers(0, 150))
def test_output_so_far_does_not_depend_on_piece_boundaries(case: str, cuts: set[int], length: int) -> None:
    name, text, _, _ = CASES[case]
    begin = text[:length]
    edges = [0, *sorted(cut for cut in cuts if cut < len(begin)), len(begin)]
    pieces = [begin[start:end] for start, end in itertools.pairwise(edges)]
    assert read(name, pieces, ended=False) == read(name, begin, ended=False), "another worker replays letter by letter"


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


TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}{% endfor %}{% endfor %}", {}
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python's parser, about escapes
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic"])
def test_random_outputs_are_calls_or_text(name: ToolFormat) -> None:
    """No output is lost, and every message can be sent back: 10,000 mutated calls, at random splits."""
    key = "parameters" if name == "llama3_json" else "arguments"
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
        assert TEMPLATE.render([one.rendered() for one in earlier.messages]).encode()


def mutated(draw: random.Random, text: str, mark: str) -> str:
    """Return a text with some of its parts cut out, repeated, exchanged or followed by other pieces."""
    for _ in range(draw.randrange(1, 4)):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice((0, 0, 1, 1, 2, 5)))
        piece = draw.choice((*PIECES, mark, text[start : start + 9], ""))
        text = text[:start] + piece + text[end:]
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.2 else text


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


WEATHER: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                "additionalProperties": False}  # fmt: skip
CALLED = [
    FunctionDefinition(name="weather", parameters=WEATHER, strict=True),
    FunctionDefinition(name="now", strict=True),
]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3_json")


@pytest.fixture(scope="module", params=KINDS)
def language(request: pytest.FixtureRequest) -> Language:
    return Language(request.param)


def call(tool_format: ToolFormat, name: str, arguments: dict[str, Any]) -> str:
    if tool_format == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


@pytest.mark.parametrize("tool_format", FORMATS)
def test_forced_calls_allow_calls_of_the_functions_and_nothing_else(
    language: Language, tool_format: ToolFormat
) -> None:
    good, other = call(tool_format, "weather", {"city": "Rome"}), call(tool_format, "now", {})
    several = forced_calls(tool_format, CALLED, parallel=True)
    single = forced_calls(tool_format, CALLED, parallel=False)
    both = ("\n" if tool_format == "hermes" else "; ").join((good, other))
    for grammar in (several, single):
        assert language.allows(grammar, good)
        assert language.allows(grammar, other)
        for bad in (
            "",
            "text",
            f"text {good}",
            good[:-1],
            call(tool_format, "weather", {"city": "Bern"}),
            call(tool_format, "weather", {}),
            call(tool_format, "now", {"a": 1}),
            call(tool_format, "later", {}),
        ):
            assert not language.allows(grammar, bad), bad
    assert language.allows(several, both)
    assert not language.allows(single, both)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_within_text_leave_text_free(language: Language, tool_format: ToolFormat) -> None:
    grammar = calls_within_text(tool_format, CALLED, parallel=True)
    good = call(tool_format, "weather", {"city": "Rome"})
    for text in ("hello {world}", "1 < 2", "<b>x</b>", "a\nb", good):
        assert language.allows(grammar, text), text
    for bad in (call(tool_format, "weather", {"city": "Bern"}), call(tool_format, "later", {})):
        assert not language.allows(grammar, bad), bad
    if tool_format == "hermes":
        assert language.allows(grammar, f"I look. {good} Done.")
        assert not language.allows(grammar, "I look. <tool_call>nothing")


def test_guided_calls_of_models_that_write_pythonic_ones_are_json(language: Language) -> None:
    """So are they in vLLM. No text begins as a pythonic call does, which the parser would not read."""
    assert guided_format("pythonic") == "llama3_json"
    good, written = call("llama3_json", "now", {}), "[now()]"
    for grammar in (forced_calls("pythonic", CALLED, parallel=True),
                    calls_within_text("pythonic", CALLED, parallel=True)):  # fmt: skip
        assert language.allows(grammar, good)
        assert not language.allows(grammar, written)
    assert language.allows(calls_within_text("pythonic", CALLED, parallel=True), f"Hello {written}")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_arguments_that_the_schema_does_not_name_are_not_allowed(language: Language, tool_format: ToolFormat) -> None:
    functions = [FunctionDefinition(name="now", parameters={"properties": {"zone": {"type": "string"}}})]
    grammar = forced_calls(tool_format, functions, parallel=False)
    assert language.allows(grammar, call(tool_format, "now", {"zone": "UTC"}))
    assert not language.allows(grammar, call(tool_format, "now", {"zone": "UTC", "other": 1}))


def test_parameters_must_be_an_object() -> None:
    bad = [FunctionDefinition(name="f", parameters={"type": "string"}, strict=True)]
    with pytest.raises(GrammarRefused, match="object"):
        forced_calls("hermes", bad, parallel=True)


def test_functions_behind_too_large_ones_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def readable(schema: Any) -> Any:
        read.append(schema)
        return schema

    monkeypatch.setattr("specdecode_worker.server.grammars.readable_schema", readable)
    large = {"enum": ["x" * (MAX_GRAMMAR_BYTES // 2)]}
    functions = [FunctionDefinition(name=f"f{i}", parameters=large) for i in range(9)]
    with pytest.raises(GrammarRefused, match=f"more than {MAX_GRAMMAR_BYTES} bytes"):
        forced_calls("hermes", functions, parallel=True)
    assert len(read) == 2


def test_search_for_the_function_at_fault_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecode_worker.server.grammars._SEARCH_SECONDS", 0.05)
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(50)]
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "small", "messages": messages, "tools": tools, "tool_choice": "required"}

    def compile_slowly(grammar: str) -> bool:
        time.sleep(0.02)
        return True

    compiler = Mock(GrammarCompiler)
    compiler.check.side_effect = GrammarRefused("too complex")
    compiler.compiles.side_effect = compile_slowly
    with pytest.raises(BadRequest, match="too complex"):
        AnswerGrammars(compiler, "hermes").compiled(ChatRequest.model_validate(body))
    assert 0 < compiler.compiles.call_count <= 3


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("tags", [(), (258, 259)], ids=["first allowed token", "tags first"])
def test_calls_are_written_to_their_end(language: Language, tool_format: ToolFormat, tags: tuple[int, ...]) -> None:
    """The literal of a tag is written whole, with its own token where the tokenizer has one."""
    text = language.written(forced_calls(tool_format, CALLED, parallel=False), wanted=tags)
    parser = parser_for(tool_format, ["weather", "now"])
    assert isinstance([*parser.push(text), *parser.end()][0], WrittenCall), text


@pytest.mark.parametrize("name", TOKENS)
def test_names_of_tokens_are_texts(language: Language, name: str) -> None:
    """A literal that is the name of a token is text, whatever the token is: in choices, patterns, schemas and calls."""
    choice, pattern = choice_grammar([f"{name}ok{name}"]), regex_grammar(re.escape(name) + "(a|b)")
    schema = json_grammar({"const": {name: name}}, white_space=False)
    for grammar, text in ((choice, f"{name}ok{name}"), (pattern, f"{name}a"), (schema, f'{{"{name}":"{name}"}}')):
        assert language.allows(grammar, text)
        assert language.written(grammar) == text
    parameters = {"properties": {"a": {"const": name}}, "required": ["a"]}
    functions = [FunctionDefinition(name="say", parameters=parameters, strict=True)]
    for tool_format in (*FORMATS, "pythonic"):
        assert name in language.written(forced_calls(tool_format, functions, parallel=False))
