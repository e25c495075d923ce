"""Grammars of tool calls: which answers they allow, for each format, and that its parser reads them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from specdecode_worker.contract import ToolFormat
from specdecode_worker.guided.grammars import (
    MAX_GRAMMAR_BYTES,
    GrammarCompiler,
    choice_grammar,
    json_grammar,
    regex_grammar,
)
from specdecode_worker.guided.guide import GrammarRefused
from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.grammars import (
    AnswerGrammars,
    calls_within_text,
    forced_calls,
    guided_format,
)
from specdecode_worker.server.requests import ChatRequest, FunctionDefinition
from specdecode_worker.server.tools import WrittenCall, parser_for
from support.published.tokens import KINDS, TOKENS, Language

WEATHER: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                "additionalProperties": False}  # fmt: skip
FUNCTIONS = [
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
    several = forced_calls(tool_format, FUNCTIONS, parallel=True)
    single = forced_calls(tool_format, FUNCTIONS, parallel=False)
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
    grammar = calls_within_text(tool_format, FUNCTIONS, parallel=True)
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
    for grammar in (forced_calls("pythonic", FUNCTIONS, parallel=True),
                    calls_within_text("pythonic", FUNCTIONS, parallel=True)):  # fmt: skip
        assert language.allows(grammar, good)
        assert not language.allows(grammar, written)
    assert language.allows(calls_within_text("pythonic", FUNCTIONS, parallel=True), f"Hello {written}")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_parser_reads_what_a_grammar_allows(language: Language, tool_format: ToolFormat) -> None:
    text = call(tool_format, "weather", {"city": "Oslo"})
    assert language.allows(forced_calls(tool_format, FUNCTIONS, parallel=False), text)
    parser = parser_for(tool_format, ["weather", "now"])
    assert [*parser.push(text), *parser.end()] == [WrittenCall("weather", '{"city": "Oslo"}')]


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


class SlowCompiler(GrammarCompiler):
    """Compiler that refuses all functions together, and takes its time for each of them."""

    def __init__(self) -> None:
        self.compiled = 0

    def check(self, grammar: str) -> None:
        raise GrammarRefused("too complex")

    def compiles(self, grammar: str) -> bool:
        self.compiled += 1
        time.sleep(0.02)
        return True


def test_search_for_the_function_at_fault_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecode_worker.server.grammars._SEARCH_SECONDS", 0.05)
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(50)]
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "small", "messages": messages, "tools": tools, "tool_choice": "required"}
    compiler = SlowCompiler()
    with pytest.raises(BadRequest, match="too complex"):
        AnswerGrammars(compiler, "hermes").compiled(ChatRequest.model_validate(body))
    assert 0 < compiler.compiled <= 3


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("tags", [(), (258, 259)], ids=["first allowed token", "tags first"])
def test_calls_are_written_to_their_end(language: Language, tool_format: ToolFormat, tags: tuple[int, ...]) -> None:
    """The literal of a tag is written whole, with its own token where the tokenizer has one."""
    text = language.written(forced_calls(tool_format, FUNCTIONS, parallel=False), wanted=tags)
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
