"""Tool definitions of chat requests, and the earlier tool calls that clients send back as history."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from specdecode_worker.server.requests.base import RequestModel
from specdecode_worker.server.tools.call_reader import FUNCTION_NAME

MAX_TOOLS = 128
JSON_OBJECT = "json-object"
"""Format name, in the OpenAPI document, of a string that contains a JSON object."""

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


def _text(arguments: Any) -> Any:
    """Return the arguments of an earlier call as a text. Clients also send null for none."""
    return "{}" if arguments is None or arguments == "" else arguments


class FunctionDefinition(RequestModel):
    """Function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. It is part of the prompt."""
    strict: bool | None = Field(default=None, exclude=True)
    """True: arguments follow the schema exactly. Otherwise only forced calls follow it, as far as grammars can."""


class Tool(RequestModel):
    """Tool that the model may call; functions are the only type."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    """Name of a function."""

    name: FunctionName


class NamedToolChoice(RequestModel):
    """Choice of one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(RequestModel):
    """Function of a tool call, with its arguments as JSON text. Unknown fields are ignored, as in ToolCall."""

    model_config = ConfigDict(extra="ignore")
    name: FunctionName
    arguments: Annotated[str, BeforeValidator(_text), Field(json_schema_extra={"format": JSON_OBJECT})]


class ToolCall(RequestModel):
    """Tool call that the assistant made in an earlier turn.

    Unknown fields are ignored: clients send back what they received, such as the ``index`` of a stream.
    """

    model_config = ConfigDict(extra="ignore")
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return the call for the chat template.

        The arguments are an object, because templates access its fields. Those that are none, such as the beginning of
        one that was cut off, remain a text, which can be encoded.
        """
        arguments: Any = self.function.arguments
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            json.dumps(parsed, ensure_ascii=False).encode()
            arguments = parsed if isinstance(parsed, dict) else arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}
