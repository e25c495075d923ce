"""Grammars of tool calls in the format of the model: calls only, or calls within text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_worker.contract import ToolFormat
from specdecode_worker.guided.closed_objects import close_objects
from specdecode_worker.guided.errors import GrammarRefused
from specdecode_worker.guided.grammars import Schema, compile_options, lark_grammar
from specdecode_worker.server.grammars.pythonic_grammars import PythonicRules

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """Function that an answer may call. ``exact`` is that of ``guided.grammars.compile_options``."""

    name: str
    parameters: Schema
    exact: bool


def forced_calls(tool_format: ToolFormat, functions: Sequence[CallableFunction], *, parallel: bool) -> str:
    """Return the grammar of answers that are calls and nothing else: several only if ``parallel``.

    Raises:
        GrammarRefused: Calls of a function cannot be expressed by a grammar.
    """
    match tool_format:
        case "hermes":
            more = r' ("\n" call)*' if parallel else ""
            lines = [f"start: call{more}"]
            begin, key, end = "<tool_call>\n", "arguments", "\n</tool_call>"
        case "llama3_json":
            more = ' ("; " call)*' if parallel else ""
            lines = [f"start: call{more}"]
            begin, key, end = "", "parameters", ""
        case "pythonic":
            more = " (SEPARATOR call)*" if parallel else ""
            return lark_grammar(f'start: "[" call{more} "]"\n{_pythonic_rules(functions)}')
    return lark_grammar("\n".join([*lines, *_call_rules(functions, begin, key, end)]))


def calls_within_text(tool_format: ToolFormat, functions: Sequence[CallableFunction], *, parallel: bool) -> str:
    """Return the grammar of answers that are text or calls, in which calls follow the functions' parameters.

    Raises:
        GrammarRefused: Calls of a function cannot be expressed by a grammar.
    """
    match tool_format:
        case "hermes":
            calls = "(called)*" if parallel else "(called)?"
            lines = [
                f"start: {calls} TEXT",
                r"TEXT: /(.|\n)*/",
                'begin[lazy]: TEXT "<tool_call>"',
                "called: begin call",
            ]
            begin, key, end = "\n", "arguments", "\n</tool_call>"
        case "llama3_json":
            more = ' ("; " call)*' if parallel else ""
            # The format has no mark for a call: an answer is one if it begins with a brace.
            lines = [f"start: TEXT | call{more}", r"TEXT: /[^{\s<](.|\n)*|<([^|](.|\n)*)?/"]
            begin, key, end = "", "parameters", ""
        case "pythonic":
            more = " (SEPARATOR call)*" if parallel else ""
            start = f'start: TEXT | "[" call{more} "]"\nTEXT: /[^\\[\\s<](.|\\n)*|<([^|](.|\\n)*)?/'
            return lark_grammar(f"{start}\n{_pythonic_rules(functions)}")
    return lark_grammar("\n".join([*lines, *_call_rules(functions, begin, key, end)]))


def _pythonic_rules(functions: Sequence[CallableFunction]) -> str:
    """Return the Lark rules of a call of one of the functions in the pythonic format."""
    rules = PythonicRules()
    for function in functions:
        try:
            rules.add(function.name, _object_schema(function), exact=function.exact)
        except GrammarRefused as error:
            place = ".".join(map(str, error.path))
            message = f"function {function.name}: {error.message}" + (f" ({place})" if place else "")
            raise GrammarRefused(message, error.path) from None
    return rules.text


def _call_rules(functions: Sequence[CallableFunction], begin: str, key: str, end: str) -> list[str]:
    """Return the Lark rules of a call of one of the functions, between the texts ``begin`` and ``end``."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        before = f'{begin}{{"name": {json.dumps(function.name)}, "{key}": '
        rules.append(f"call_{i}: {json.dumps(before)} arguments_{i} {json.dumps('}' + end)}")
        rules.append(f"arguments_{i}: %json {json.dumps(_arguments_schema(function))}")
    return rules


def _arguments_schema(function: CallableFunction) -> dict[str, Any]:
    """Return the schema of the arguments with llguidance's options in it."""
    closed = close_objects(_object_schema(function))
    return {"x-guidance": compile_options(exact=function.exact, white_space=True), **closed}


def _object_schema(function: CallableFunction) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object."""
    schema = function.parameters if isinstance(function.parameters, dict) else ANY_ARGUMENTS
    if schema.get("type", "object") != "object":
        raise GrammarRefused("the parameters of a function must be of type object", ("type",))
    return {**schema, "type": "object"}
