"""Request body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.requests.base import RequestModel
from specdecode_worker.server.requests.common import MAX_LOGPROBS, GenerationRequest
from specdecode_worker.server.requests.tools import MAX_TOOLS, NamedToolChoice, Tool, ToolCall
from specdecode_worker.server.requests.unsupported_fields import unsupported

# Chat templates use the older name that OpenAI had for the role.
_RENDERED_ROLES = {"developer": "system"}
_TAKEN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class TextPart(RequestModel):
    """Part of a message content; only text is supported."""

    type: Literal["text"]
    text: str


def _plain_text(value: Any) -> Any:
    """Convert content to one text. OpenAI also accepts null, and a list of parts."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"only parts of type 'text' are supported, got {kind!r}")
    return "".join(part["text"] for part in value)


def _without_empty(value: Any) -> Any:
    """Drop unused fields. Clients that send back a message of a response include them as null or as empty lists."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key == "content" or item not in _unused(key)}
    return value


def _unused(key: str) -> tuple[object, ...]:
    return (None,) if key in ("role", "name", "tool_call_id") else (None, [])


class ChatMessage(RequestModel):
    """One turn of the conversation. Content is required, except for an assistant's turn with tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_plain_text, json_schema_input_type=str | list[TextPart] | None)] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default=[])
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("a message of role 'tool' needs tool_call_id, and no other has it")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return one schema per role, because one flat object cannot express which fields a role requires."""
        fields = handler.resolve_ref_schema(handler(core_schema))["properties"]

        def turn(roles: list[str], required: list[str], *optional: str) -> dict[str, Any]:
            named = {name: fields[name] for name in (*required, *optional)}
            return {
                "type": "object",
                "required": ["role", *required],
                "properties": {"role": {"enum": roles}, **named},
                "additionalProperties": False,
            }

        calls = turn(["assistant"], ["tool_calls"], "content", "name")
        calls["properties"]["tool_calls"] = {**fields["tool_calls"], "minItems": 1}
        said = turn(["system", "developer", "user", "assistant"], ["content"], "name")
        result = turn(["tool"], ["content", "tool_call_id"], "name")
        result["properties"]["tool_call_id"] = {"type": "string"}
        return {"anyOf": [said, calls, result]}

    def rendered(self) -> dict[str, Any]:
        """Return the message for the chat template.

        Templates test the presence of ``tool_calls``, so an empty list is left out.
        """
        message: dict[str, Any] = {"role": _RENDERED_ROLES.get(self.role, self.role), "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[Annotated[ChatMessage, BeforeValidator(_without_empty)]], Field(min_length=1)]


class ChatRequest(GenerationRequest):
    """Request for the next turn of a conversation."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False keeps the first tool call of a choice and drops the others."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Further variables of the chat template, as in vLLM."""

    @property
    def token_limit(self) -> int | None:
        """Largest number of output tokens that the client requests; None for no limit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of top log-probabilities per output token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Tools for the chat template; empty with ``tool_choice`` "none", so that the model makes no call."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def forced_tools(self) -> list[Tool]:
        """Tools of which the answer must call one; empty if it may also be text."""
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name][:1]
        return self.tools if self.tool_choice == "required" else []

    @property
    def has_strict_tools(self) -> bool:
        """True if the answer may call a function with ``strict``."""
        return self.tool_choice != "none" and any(tool.function.strict for tool in self.tools)

    @property
    def guides_calls(self) -> bool:
        """True if a grammar assures that calls in the answer are valid."""
        return bool(self.forced_tools) or (self.has_strict_tools and not self.has_format)

    def _check_tool_choice(self) -> None:
        """Raise BadRequest for a tool_choice without the tool, or for strict functions together with another format."""
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise BadRequest("tool_choice needs a function that tools has", param="tool_choice", code="invalid_value")
        if self.has_strict_tools and not self.forced_tools and self.has_format:
            raise unsupported(
                "functions with strict and another format of the answer are not supported together; leave out strict, "
                "or set tool_choice to 'required' or 'none'", "tools",
            )  # fmt: skip

    def check(self) -> None:
        """Raise BadRequest for invalid or unsupported combinations of logprobs, tools and template variables."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        self._check_tool_choice()
        if taken := sorted(self.chat_template_kwargs.keys() & _TAKEN_VARIABLES):
            raise BadRequest(f"chat_template_kwargs must not set {taken[0]}", param="chat_template_kwargs")
