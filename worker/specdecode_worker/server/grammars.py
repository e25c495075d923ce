"""Grammars of answers: built from the fields of a request, and checked before the request starts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_worker.contract import ToolFormat
from specdecode_worker.guided import grammars
from specdecode_worker.guided.grammars import (
    GrammarCompiler,
    check_size,
    compile_options,
    lark_grammar,
    readable_schema,
)
from specdecode_worker.guided.guide import GrammarRefused
from specdecode_worker.server.errors import BadRequest, invalid_value, unsupported
from specdecode_worker.server.requests import (
    ChatRequest,
    FunctionDefinition,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    Tool,
)

# Grammars of tool calls in the format of the model: calls only, or calls within text.

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


# Each format's text before a call, the key of its arguments, the text behind it, and what separates two calls.
_HERMES = "<tool_call>\n", "arguments", "\n</tool_call>", "\n"
_JSON = "", "parameters", "", "; "


def guided_format(tool_format: ToolFormat) -> ToolFormat:
    """Return the format in which calls are written that a grammar guides: JSON for models of the pythonic one."""
    return "llama3_json" if tool_format == "pythonic" else tool_format


def forced_calls(tool_format: ToolFormat, functions: Sequence[FunctionDefinition], *, parallel: bool) -> str:
    """Return the grammar of answers that are calls and nothing else: several only if ``parallel``.

    Raises:
        GrammarRefused: Calls of a function cannot be expressed by a grammar.
    """
    begin, key, end, between = _HERMES if tool_format == "hermes" else _JSON
    more = f" ({json.dumps(between)} call)*" if parallel else ""
    return lark_grammar("\n".join([f"start: call{more}", *_call_rules(functions, begin, key, end)]))


def calls_within_text(tool_format: ToolFormat, functions: Sequence[FunctionDefinition], *, parallel: bool) -> str:
    """Return the grammar of answers that are text or calls, in which calls follow the functions' parameters.

    Raises:
        GrammarRefused: Calls of a function cannot be expressed by a grammar.
    """
    if tool_format == "hermes":
        _, key, end, _ = _HERMES
        lines = [
            f"start: {'(called)*' if parallel else '(called)?'} TEXT",
            r"TEXT: /(.|\n)*/",
            'begin[lazy]: TEXT "<tool_call>"',
            "called: begin call",
        ]
        return lark_grammar("\n".join([*lines, *_call_rules(functions, "\n", key, end)]))
    begin, key, end, between = _JSON
    more = f" ({json.dumps(between)} call)*" if parallel else ""
    # The format has no mark for a call: an answer is one if it begins with a brace. No text begins as a pythonic call.
    taken = r"{\[" if tool_format == "pythonic" else "{"
    lines = [f"start: TEXT | call{more}", rf"TEXT: /[^{taken}\s<](.|\n)*|<([^|](.|\n)*)?/"]
    return lark_grammar("\n".join([*lines, *_call_rules(functions, begin, key, end)]))


def _call_rules(functions: Sequence[FunctionDefinition], begin: str, key: str, end: str) -> list[str]:
    """Return the Lark rules of a call of one of the functions, between the texts ``begin`` and ``end``."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        before = f'{begin}{{"name": {json.dumps(function.name)}, "{key}": '
        rules.append(f"call_{i}: {json.dumps(before)} arguments_{i} {json.dumps('}' + end)}")
        rules.append(f"arguments_{i}: %json {json.dumps(_arguments_schema(function))}")
        check_size(*rules)
    return rules


def _arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object, with llguidance's options in it."""
    schema = NO_ARGUMENTS if function.parameters is None else function.parameters
    if not _are_arguments(schema):
        raise GrammarRefused("the parameters of a function must be of type object")
    closed = readable_schema({**schema, "type": "object"})
    return {"x-guidance": compile_options(exact=bool(function.strict), white_space=True), **closed}


def _are_arguments(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("type", "object") == "object")


# Grammars of answers: built from a request, and compiled.

_SEARCH_SECONDS = 1.0
"""Longest search for the function whose parameters no grammar can express. Other requests wait for its thread."""


class AnswerGrammars:
    """Grammars of answers for one model."""

    def __init__(self, compiler: GrammarCompiler, tool_format: ToolFormat | None) -> None:
        """Create the builder. ``tool_format`` is the tool call format of the model; None if it has none."""
        self._compiler, self._tool_format = compiler, tool_format

    def compiled(self, body: GenerationRequest) -> str:
        """Return the grammar of the answers to a request that may not be any text. Run it in a thread.

        Raises:
            BadRequest: The grammar cannot be used; the error names the field at fault.
        """
        try:
            grammar = self._grammar(body)
            self._compiler.check(grammar)
        except GrammarRefused as error:
            raise self._refusal(error, body) from None
        return grammar

    def _grammar(self, body: GenerationRequest) -> str:
        if isinstance(body, ChatRequest) and body.guides_calls:
            return self._calls(body)
        answer_format = body.response_format
        if isinstance(answer_format, JsonSchemaFormat):
            schema = answer_format.json_schema
            return grammars.json_grammar(schema.schema_, exact=bool(schema.strict))
        if isinstance(answer_format, JsonObjectFormat):
            return grammars.json_grammar({"type": "object"})
        if body.structured_outputs is not None:
            return _structured(body.structured_outputs)
        return grammars.text_without(body.bad_words)

    def _calls(self, body: ChatRequest) -> str:
        assert self._tool_format is not None, "the route has checked that the model can call tools"
        if body.forced_tools:
            functions = [tool.function for tool in body.forced_tools]
            return forced_calls(self._tool_format, functions, parallel=body.parallel_tool_calls)
        functions = [tool.function for tool in body.tools]
        return calls_within_text(self._tool_format, functions, parallel=body.parallel_tool_calls)

    def _refusal(self, error: GrammarRefused, body: GenerationRequest) -> BadRequest:
        """Return the response that names the field at fault."""
        if not (isinstance(body, ChatRequest) and body.guides_calls):
            return invalid_value(str(error), _field(body))
        began = time.monotonic()
        for i, tool in enumerate(body.tools):
            if time.monotonic() - began > _SEARCH_SECONDS:
                break
            if tool in (body.forced_tools or body.tools) and not self._compiles(tool):
                return invalid_value(str(error), f"tools[{i}].function.parameters")
        return unsupported(str(error), "tool_choice")

    def _compiles(self, tool: Tool) -> bool:
        """Return whether the parameters of a function can be compiled."""
        parameters = tool.function.parameters
        if parameters is None:
            return True
        try:
            grammar = grammars.json_grammar(parameters, exact=bool(tool.function.strict))
            return _are_arguments(parameters) and self._compiler.compiles(grammar)
        except GrammarRefused:
            return False


def _structured(wanted: StructuredOutputs) -> str:
    """Return the grammar of vLLM's field ``structured_outputs``."""
    spaced = not wanted.disable_any_whitespace
    if wanted.regex is not None:
        return grammars.regex_grammar(wanted.regex)
    if wanted.choice is not None:
        return grammars.choice_grammar(wanted.choice)
    if wanted.grammar is not None:
        return grammars.context_free_grammar(wanted.grammar)
    if wanted.json_ is None:
        return grammars.json_grammar({"type": "object"}, white_space=spaced)
    return grammars.json_grammar(_schema_of(wanted.json_), white_space=spaced)


def _schema_of(schema: dict[str, Any] | str) -> Any:
    """Return a schema that may be given as its text."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"the schema is no JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise GrammarRefused("the schema must be an object")
    return parsed


def _field(body: GenerationRequest) -> str:
    """Return the field that the grammar of a request without functions is made of."""
    if isinstance(body.response_format, JsonSchemaFormat):
        return "response_format.json_schema.schema"
    wanted = body.structured_outputs
    if wanted is None:
        return "response_format" if body.has_format else "bad_words"
    kinds = {"json": wanted.json_, "regex": wanted.regex, "choice": wanted.choice, "grammar": wanted.grammar}
    return "structured_outputs." + next((kind for kind, value in kinds.items() if value is not None), "json_object")
