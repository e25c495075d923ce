"""Grammars of answers: built from the fields of a request, and checked before the request starts."""

from __future__ import annotations

import asyncio
import json
import keyword
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from specdecode_worker.contract import ToolFormat
from specdecode_worker.guided import grammars
from specdecode_worker.guided.grammars import (
    GrammarCompiler,
    Schema,
    close_objects,
    compile_options,
    lark_grammar,
    with_readable_numbers,
)
from specdecode_worker.guided.guide import GrammarRefused
from specdecode_worker.server.errors import BadRequest, TooManyWaiting
from specdecode_worker.server.requests import (
    ChatRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    Tool,
    unsupported,
)

# Lark rules of calls in the pythonic format, such as ``[get_weather(city="Oslo", days=3), now()]``.
#
# The arguments are Python literals, so they are not covered by the library's JSON grammar: ``True``, ``False`` and
# ``None`` differ from JSON, and so do some escapes. A schema becomes rules here; what these rules cannot express is
# refused for functions with ``strict``, and ignored for others.

Path = tuple[str | int, ...]

_TERMINALS = (
    r'STRING: /"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"/',
    r"INTEGER: /-?(0|[1-9][0-9]{0,17})/",
    r"NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    "SEPARATOR: /, ?/",
    'true_or_false: "True" | "False"',
    'literal: STRING | NUMBER | true_or_false | "None" | list | dict',
    'list: "[" (literal (SEPARATOR literal)*)? "]"',
    'dict: "{" (STRING ": " literal (SEPARATOR STRING ": " literal)*)? "}"',
)
_RULE_OF_TYPE = {"string": "STRING", "integer": "INTEGER", "number": "NUMBER", "boolean": "true_or_false",
                 "null": '"None"', "array": "list", "object": "dict"}  # fmt: skip
_HANDLED = frozenset(("type", "enum", "const", "anyOf", "oneOf", "items", "properties", "required",
                      "additionalProperties", "$ref", "$defs", "definitions"))  # fmt: skip
_WITHOUT_EFFECT = frozenset(("title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated"))
MOST_RULES = 2_000
"""Most rules of the functions of one request; each takes a few microseconds to compile."""


class PythonicRules:
    """Rules of calls of several functions. ``lines`` holds them as Lark text, with the rule ``call``."""

    def __init__(self) -> None:
        self.lines = list(_TERMINALS)
        self._calls: list[str] = []
        self._root: Mapping[str, Any] = {}
        self._exact = True
        self._references: dict[str, str] = {}

    def add(self, name: str, parameters: Mapping[str, Any], *, exact: bool) -> None:
        """Add a function. With ``exact``, constraints that the rules cannot express are refused.

        Raises:
            GrammarRefused: The function cannot be called in this format; the error names the part of its schema.
        """
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            raise GrammarRefused(f"calls in the pythonic format need a Python name; {name} is none")
        self._root, self._exact, self._references = parameters, exact, {}
        self._check(parameters, ())
        arguments = {}
        required = set(parameters.get("required", ()))
        for argument, schema in parameters.get("properties", {}).items():
            if argument.isidentifier() and not keyword.iskeyword(argument):
                value = self._value(schema, ("properties", argument))
                arguments[argument] = f'"{argument}=" {value}', argument in required
            elif exact or argument in required:
                raise GrammarRefused(f"the pythonic format cannot name {argument}", ("properties", argument))
        if missing := sorted(required - arguments.keys()):
            raise GrammarRefused(f"required names {missing[0]}, which is no property", ("required",))
        self._calls.append(self._rule(f'{json.dumps(name + "(")} {self._sequence(list(arguments.values()))} ")"'))

    @property
    def text(self) -> str:
        """All rules, with ``call`` for a call of any of the functions."""
        return "\n".join([*self.lines, f"call: {' | '.join(self._calls)}"])

    def _rule(self, body: str) -> str:
        """Add a rule and return its name."""
        if len(self.lines) >= MOST_RULES:
            raise GrammarRefused("the schemas of the functions are too large")
        self.lines.append(f"rule_{len(self.lines)}: {body}")
        return self.lines[-1].partition(":")[0]

    def _sequence(self, items: Sequence[tuple[str, bool]]) -> str:
        """Return a rule of items in order, of which the required ones are never left out."""
        after, first = '""', '""'
        for body, is_required in reversed(items):
            start = f"{body} {after}"
            go_on = self._rule(f"SEPARATOR {start}" + ("" if is_required else f" | {after}"))
            first = self._rule(start + ("" if is_required else f" | {first}"))
            after = go_on
        return first

    def _value(self, schema: Any, path: Path) -> str:
        """Return the rule of the values that a schema allows."""
        if not isinstance(schema, Mapping):
            return "literal"
        self._check(schema, path)
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), (*path, "$ref"))
        if "const" in schema or "enum" in schema:
            allowed = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rule(" | ".join(json.dumps(_python(value)) for value in allowed))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._rule(" | ".join(self._value(one, (*path, key, i)) for i, one in enumerate(schema[key])))
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        return self._rule(" | ".join(self._of_type(kind, schema, path) for kind in kinds)) if kinds else "literal"

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: Path) -> str:
        """Return the rule of the values of one type."""
        if kind == "array" and "items" in schema:
            item = self._value(schema["items"], (*path, "items"))
            return self._rule(f'"[" ({item} (SEPARATOR {item})*)? "]"')
        if kind == "object" and schema.get("properties"):
            required = set(schema.get("required", ()))
            entries = [
                (f"{json.dumps(json.dumps(name) + ': ')} {self._value(one, (*path, 'properties', name))}",
                 name in required)
                for name, one in schema["properties"].items()
            ]  # fmt: skip
            return self._rule(f'"{{" {self._sequence(entries)} "}}"')
        if kind not in _RULE_OF_TYPE:
            raise GrammarRefused(f"there is no type {kind}", (*path, "type"))
        return _RULE_OF_TYPE[kind]

    def _reference(self, reference: str, path: Path) -> str:
        """Return the rule of a referenced definition. It may refer to itself."""
        if reference not in self._references:
            self._references[reference] = name = f"reference_{len(self.lines)}"
            self.lines.append("")
            place = len(self.lines) - 1
            steps = reference.split("/")
            definition: Any = self._root
            for step in steps[1:]:
                definition = definition.get(step) if isinstance(definition, Mapping) else None
            if steps[0] != "#" or definition is None:
                raise GrammarRefused(f"{reference} refers to nothing in the schema", path)
            self.lines[place] = f"{name}: {self._value(definition, tuple(steps[1:]))}"
        return self._references[reference]

    def _check(self, schema: Mapping[str, Any], path: Path) -> None:
        """Refuse keywords that the rules cannot express, for functions with ``strict``."""
        unknown = sorted(schema.keys() - _HANDLED - _WITHOUT_EFFECT)
        if self._exact and unknown:
            raise GrammarRefused(f"calls in the pythonic format cannot express {unknown[0]}", (*path, unknown[0]))


def _python(value: Any) -> str:
    """Return a JSON value as a Python literal."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(one)}" for key, one in value.items()) + "}"
    return repr(value)


# Grammars of tool calls in the format of the model: calls only, or calls within text.

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
    closed = close_objects(with_readable_numbers(_object_schema(function)))
    return {"x-guidance": compile_options(exact=function.exact, white_space=True), **closed}


def _object_schema(function: CallableFunction) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object."""
    schema = function.parameters if isinstance(function.parameters, dict) else ANY_ARGUMENTS
    if schema.get("type", "object") != "object":
        raise GrammarRefused("the parameters of a function must be of type object", ("type",))
    return {**schema, "type": "object"}


# Grammars of answers: built from a request and compiled in a thread, so that other requests do not wait.

COMPILE_SECONDS = 10.0
"""Longest time that a request waits for its grammar. Bounds of the compiler keep a compilation far below it."""


class AnswerGrammars:
    """Grammars of answers for one model."""

    def __init__(self, compiler: GrammarCompiler, tool_format: ToolFormat | None) -> None:
        """Create the builder. ``tool_format`` is the tool call format of the model; None if it has none."""
        self._compiler, self._tool_format = compiler, tool_format
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def of(self, body: GenerationRequest) -> str:
        """Return the grammar of the answers to a request; empty if they may be any text.

        Raises:
            BadRequest: The grammar cannot be used; the error names the field at fault.
            TooManyWaiting: Other compilations take too long.
        """
        if not body.prescribes_answer and not body.bad_words:
            return ""
        try:
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, body)
            return await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError:
            raise TooManyWaiting("grammars take too long to compile now; try again later") from None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, body: GenerationRequest) -> str:
        """Build and check the grammar of a request."""
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
            functions = _functions(body.forced_tools)
            return forced_calls(self._tool_format, functions, parallel=body.parallel_tool_calls)
        return calls_within_text(self._tool_format, _functions(body.tools), parallel=body.parallel_tool_calls)

    def _refusal(self, error: GrammarRefused, body: GenerationRequest) -> BadRequest:
        """Return the response that names the field at fault."""
        if not (isinstance(body, ChatRequest) and body.guides_calls):
            return BadRequest(error.message, param=_field(body), code="invalid_value")
        for i, tool in enumerate(body.tools):
            if tool in (body.forced_tools or body.tools) and not self._compiles(tool):
                return BadRequest(error.message, param=f"tools[{i}].function.parameters", code="invalid_value")
        if error.path:
            return BadRequest(error.message, param="tools", code="invalid_value")
        return unsupported(error.message, "tool_choice")

    def _compiles(self, tool: Tool) -> bool:
        """Return whether the parameters of a function can be compiled."""
        if tool.function.parameters is None:
            return True
        try:
            grammar = grammars.json_grammar(tool.function.parameters, exact=bool(tool.function.strict))
            return self._compiler.compiles(grammar)
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


def _functions(tools: Sequence[Tool]) -> list[CallableFunction]:
    return [
        CallableFunction(
            tool.function.name,
            NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters,
            bool(tool.function.strict),
        )
        for tool in tools
    ]


def _field(body: GenerationRequest) -> str:
    """Return the field that the grammar of a request without functions is made of."""
    if isinstance(body.response_format, JsonSchemaFormat):
        return "response_format.json_schema.schema"
    wanted = body.structured_outputs
    if wanted is None:
        return "response_format" if body.has_format else "bad_words"
    kinds = {"json": wanted.json_, "regex": wanted.regex, "choice": wanted.choice, "grammar": wanted.grammar}
    return "structured_outputs." + next((kind for kind, value in kinds.items() if value is not None), "json_object")
