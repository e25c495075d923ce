"""Grammars of tool calls: which answers they allow, for each format, and that its parser reads them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import small_model

from specdecode_worker.contract import ToolFormat
from specdecode_worker.guided.errors import GrammarRefused
from specdecode_worker.guided.grammar_compiler import GrammarCompiler
from specdecode_worker.server.grammars.call_grammars import (
    NO_ARGUMENTS,
    CallableFunction,
    calls_within_text,
    forced_calls,
)
from specdecode_worker.server.tools.deltas import ArgumentsDelta, CallStart
from specdecode_worker.server.tools.parser_choice import parser_for

WEATHER: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                "additionalProperties": False}  # fmt: skip
FUNCTIONS = [CallableFunction("weather", WEATHER, exact=True), CallableFunction("now", NO_ARGUMENTS, exact=True)]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3_json")
TOKENIZER = small_model.byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_str, small_model.VOCAB_SIZE, (small_model.END_ID,))


def allows(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Return whether an answer may be exactly this text."""
    guide = compiler.guide(grammar)
    mask = guide.mask(TOKENIZER.encode(text).ids)
    end = small_model.END_ID
    return mask is not None and bool(mask[end // 32] >> np.uint32(end % 32) & 1)


def call(tool_format: ToolFormat, name: str, arguments: dict[str, Any]) -> str:
    if tool_format == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


@pytest.mark.parametrize("tool_format", FORMATS)
def test_forced_calls_allow_calls_of_the_functions_and_nothing_else(
    compiler: GrammarCompiler, tool_format: ToolFormat
) -> None:
    good, other = call(tool_format, "weather", {"city": "Rome"}), call(tool_format, "now", {})
    several = forced_calls(tool_format, FUNCTIONS, parallel=True)
    single = forced_calls(tool_format, FUNCTIONS, parallel=False)
    both = ("\n" if tool_format == "hermes" else "; ").join((good, other))
    for grammar in (several, single):
        assert allows(compiler, grammar, good)
        assert allows(compiler, grammar, other)
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
            assert not allows(compiler, grammar, bad), bad
    assert allows(compiler, several, both)
    assert not allows(compiler, single, both)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_within_text_leave_text_free(compiler: GrammarCompiler, tool_format: ToolFormat) -> None:
    grammar = calls_within_text(tool_format, FUNCTIONS, parallel=True)
    good = call(tool_format, "weather", {"city": "Rome"})
    for text in ("hello {world}", "1 < 2", "<b>x</b>", "a\nb", good):
        assert allows(compiler, grammar, text), text
    for bad in (call(tool_format, "weather", {"city": "Bern"}), call(tool_format, "later", {})):
        assert not allows(compiler, grammar, bad), bad
    if tool_format == "hermes":
        assert allows(compiler, grammar, f"I look. {good} Done.")
        assert not allows(compiler, grammar, "I look. <tool_call>nothing")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_parser_reads_what_a_grammar_allows(compiler: GrammarCompiler, tool_format: ToolFormat) -> None:
    text = call(tool_format, "weather", {"city": "Oslo"})
    assert allows(compiler, forced_calls(tool_format, FUNCTIONS, parallel=False), text)
    parser = parser_for(tool_format, ["weather", "now"])
    deltas = [*parser.push(text), *parser.end()]
    assert deltas[0] == CallStart("weather")
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, ArgumentsDelta))
    assert json.loads(arguments) == {"city": "Oslo"}


@pytest.mark.parametrize("tool_format", FORMATS)
def test_arguments_that_the_schema_does_not_name_are_not_allowed(
    compiler: GrammarCompiler, tool_format: ToolFormat
) -> None:
    functions = [CallableFunction("now", {"properties": {"zone": {"type": "string"}}}, exact=False)]
    grammar = forced_calls(tool_format, functions, parallel=False)
    assert allows(compiler, grammar, call(tool_format, "now", {"zone": "UTC"}))
    assert not allows(compiler, grammar, call(tool_format, "now", {"zone": "UTC", "other": 1}))


def test_parameters_must_be_an_object() -> None:
    bad = [CallableFunction("f", {"type": "string"}, exact=True)]
    with pytest.raises(GrammarRefused, match="object"):
        forced_calls("hermes", bad, parallel=True)
