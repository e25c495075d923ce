"""Grammars of answers: built from a request and compiled in a thread, so that other requests do not wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specdecode_worker.contract import ToolFormat
from specdecode_worker.guided import grammars
from specdecode_worker.guided.errors import GrammarRefused
from specdecode_worker.guided.grammar_compiler import GrammarCompiler
from specdecode_worker.server.errors import BadRequest, TooManyWaiting
from specdecode_worker.server.grammars.call_grammars import (
    NO_ARGUMENTS,
    CallableFunction,
    calls_within_text,
    forced_calls,
)
from specdecode_worker.server.requests import ChatRequest, GenerationRequest
from specdecode_worker.server.requests.structured_outputs import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from specdecode_worker.server.requests.tools import Tool
from specdecode_worker.server.requests.unsupported_fields import unsupported

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
        if not body.has_format and not (isinstance(body, ChatRequest) and body.guides_calls):
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
        assert body.structured_outputs is not None
        return _structured(body.structured_outputs)

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
        return "response_format"
    kinds = {"json": wanted.json_, "regex": wanted.regex, "choice": wanted.choice, "grammar": wanted.grammar}
    return "structured_outputs." + next((kind for kind, value in kinds.items() if value is not None), "json_object")
