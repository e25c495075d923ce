"""Functions that a model may call, and the calls that clients send back as history."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from specdecode_worker.server.requests.base import Checked

MAX_TOOLS = 128
JSON_OBJECT = "json-object"
"""Format, in the API's description, of a text that is one."""

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _not_strict(value: bool | None) -> bool | None:
    if value:
        raise ValueError("answers are not constrained to a schema, so strict cannot be kept; leave it out")
    return value


def _object(value: str) -> str:
    """A template takes the arguments apart, so they must be what they say they are."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object, written as a text")
    return value


class FunctionDefinition(Checked):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema. It is shown to the model; nothing holds the model to it."""
    strict: Annotated[bool | None, AfterValidator(_not_strict)] = Field(default=None, exclude=True)


class Tool(Checked):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Checked):
    name: FunctionName


class NamedToolChoice(Checked):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Checked):
    name: FunctionName
    arguments: Annotated[str, AfterValidator(_object), Field(json_schema_extra={"format": JSON_OBJECT})]


class ToolCall(Checked):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """As chat templates expect it: with the arguments as an object."""
        called = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": called}
