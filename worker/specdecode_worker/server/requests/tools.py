"""Tool definitions of chat requests, and the earlier tool calls that clients send back as history."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from specdecode_worker.server.requests.base import RequestModel

MAX_TOOLS = 128
JSON_OBJECT = "json-object"
"""Format name, in the OpenAPI document, of a string that contains a JSON object."""

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _object(value: str) -> str:
    """Check that the arguments are a JSON object, because chat templates access their fields."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object, written as a text")
    return value


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
    """Function of a tool call, with its arguments as JSON text."""

    name: FunctionName
    arguments: Annotated[str, AfterValidator(_object), Field(json_schema_extra={"format": JSON_OBJECT})]


class ToolCall(RequestModel):
    """Tool call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return the call for the chat template, with the arguments as an object."""
        called = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": called}
