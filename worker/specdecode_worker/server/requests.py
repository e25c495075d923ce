"""Request bodies of the HTTP API, as pydantic models that validate them once.

There are four kinds of fields: supported fields (the models of this module), fields without effect on the output
(dropped), fields of OpenAI or vLLM that would change the output and are not supported (refused unless neutral), and
unknown fields, which are ignored and named in a header of the response.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import quote

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from specdecode_worker.contract import (
    DraftConfig,
    DraftQuantization,
    Method,
    Placement,
    Written,
)
from specdecode_worker.server.errors import BadRequest, invalid_value, unsupported
from specdecode_worker.server.tools import FUNCTION_NAME

# Base class and shared types of the request models.
#
# A list whose length is not bounded is refused at its first wrong entry (`FailFast`). pydantic would collect the errors
# of all entries: two million fit a body, which would stop all streams for seconds.


class RequestModel(BaseModel):
    """Base of the request models. "0.5" is not accepted as a number, as with OpenAI.

    Unknown fields are ignored: histories and tools come back with fields of other servers and of clients' libraries.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    def check(self) -> None:
        """Check constraints between several fields. Raises BadRequest that names the field at fault."""


class RequestBody(RequestModel):
    """Body of a request. Unknown fields are ignored and named to the client."""

    model_config = ConfigDict(extra="allow")

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of the fields that the server does not know."""
        return tuple(self.model_extra or ())


_MOST_FIELDS = 64
"""More fields than any `ClosedModel` has: one of so many is unknown, and is enough for the refusal."""


class ClosedModel(RequestModel):
    """Object whose unknown fields are refused, unless they are null or false as clients that know more send them."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unset(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = ((name, value) for name, value in fields.items() if value is not None and value is not False)
        return dict(itertools.islice(given, _MOST_FIELDS))


MAX_ID = 2**31 - 1
"""Largest token id of any vocabulary. The served model has a lower bound, which is checked later."""
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]


# Request fields outside the models: fields without effect, and unsupported fields with their neutral values.

# These fields control storage, billing or speed in other servers; they do not change the output.
WITHOUT_EFFECT = frozenset(
    {
        "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "request_id", "guided_decoding_backend",
    }
)  # fmt: skip
# Unsupported fields of OpenAI and vLLM that would change the output with any value.
_NEVER_NEUTRAL = (
    "prompt", "messages", "max_completion_tokens", "prompt_embeds", "prompt_logprobs", "chat_template",
    "thinking_token_budget", "verbosity", "web_search_options", "audio", "repetition_detection", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern", "structural_tag",
)  # fmt: skip
# All unsupported fields, with the values at which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER_NEUTRAL, ()),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True, False),
    "chat_template_kwargs": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprob_token_ids": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "use_beam_search": (False,),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "priority": (0,),
    "logits_processors": ([],),
    "detokenize": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
}
# Supported fields to send instead.
_INSTEAD = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
}
_SAME = {bool: (bool,), int: (int, float), float: (int, float)}


def drop_neutral_fields(fields: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the fields to validate: without nulls, fields without effect, and neutral values of unsupported fields.

    Args:
        fields: Fields of the request body.
        known: Names of the fields of the request model, which are kept.

    Raises:
        BadRequest: An unsupported field has a value that would change the output.
    """
    effective_fields = {}
    for name, value in fields.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in known or name not in NEUTRAL:
            effective_fields[name] = _whole(value)
        elif name == "best_of" and _same(value, fields.get("n")):
            continue
        elif not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            instead = f"; send {_INSTEAD[name]}" if name in _INSTEAD else "; leave it out"
            raise unsupported(f"{name} is not supported here with this value{instead}", name)
    return effective_fields


IGNORED_HEADER = "X-Specdecode-Ignored"
"""Header of the response with the names of the fields that were ignored, percent-encoded."""
_MAX_IGNORED, _MAX_NAME = 16, 64
"""Names in the header, and characters of one."""


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names ignored fields; empty without any."""
    if not names:
        return {}
    return {IGNORED_HEADER: ", ".join(quote(name[:_MAX_NAME], safe="") for name in names[:_MAX_IGNORED])}


def _whole(value: Any) -> Any:
    """Convert integral floats to int, because JSON does not distinguish 5.0 from 5.

    Float fields are not affected, because they accept integers too.
    """
    if isinstance(value, list):
        # Millions of token ids fit a body, so only those that need it are converted one by one.
        return [_whole(item) for item in value] if float in set(map(type, value)) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _same(value: Any, neutral: Any) -> bool:
    # False == 0 in Python, but a request with echo 0 differs from one with echo false.
    return isinstance(value, _SAME.get(type(neutral), (type(neutral),))) and (
        isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
    )


# Request fields that prescribe the format of the answer. An unknown field in them would change it, and is refused.

MAX_CHOICE_TEXTS = 1024
MAX_SCHEMA_NAME = 64
REGEX, GRAMMAR = "rust-regex", "lark-grammar"
"""Format names, in the OpenAPI document, of regular expressions and grammars."""


class TextFormat(ClosedModel):
    """Any text, the default."""

    type: Literal["text"]


class JsonObjectFormat(ClosedModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(ClosedModel):
    """JSON schema with a name, which is part of no prompt."""

    name: str = Field(min_length=1, max_length=MAX_SCHEMA_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """True refuses keywords that a grammar cannot express. Otherwise they are ignored."""


class JsonSchemaFormat(ClosedModel):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(ClosedModel):
    """Grammar of the answer, as in vLLM: exactly one of the first five fields is set."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    """JSON schema, as an object or as its text."""
    regex: str | None = Field(default=None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICE_TEXTS
    )
    grammar: str | None = Field(default=None, min_length=1)
    """Context-free grammar in Lark's or GBNF's notation."""
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    """Allow no white space between JSON tokens."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return one schema per kind of grammar, because one flat object cannot express that exactly one is set."""
        fields = handler.resolve_ref_schema(handler(core_schema))["properties"]
        space = "disable_any_whitespace"
        text = {"type": "string", "minLength": 1}
        kinds = {
            "json": {"type": "object"},
            "regex": {**text, "format": REGEX},
            "choice": {"type": "array", "minItems": 1, "maxItems": MAX_CHOICE_TEXTS, "items": text},
            "grammar": {**text, "format": GRAMMAR},
            "json_object": {"const": True},
        }
        return {
            "oneOf": [
                {
                    "type": "object",
                    "required": [kind],
                    "properties": {kind: schema, space: fields[space]},
                    "additionalProperties": False,
                }
                for kind, schema in kinds.items()
            ]
        }

    def check(self) -> None:
        """Raise BadRequest unless exactly one kind of grammar is set."""
        values = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        count = sum(value is not None for value in values)
        if count != 1:
            raise invalid_value(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, and has {count}", "structured_outputs"
            )


# Tool definitions of chat requests, and the earlier tool calls that clients send back as history.

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
    """Function of a tool call, with its arguments as JSON text."""

    name: FunctionName
    arguments: Annotated[str, BeforeValidator(_text), Field(json_schema_extra={"format": JSON_OBJECT})]


class ToolCall(RequestModel):
    """Tool call that the assistant made in an earlier turn."""

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


# Fields that completion and chat requests share.

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
"""Longest stop string. Text that may be its beginning is held back, and copied with every token."""
MAX_CHOICES = 128
MAX_BIASES = 1024
"""Most tokens of logit_bias, and of allowed_token_ids."""
MAX_BAD_WORDS = 64
MAX_LOGPROBS = 20
MAX_CACHE_SALT = 256


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _user_text(value: Any) -> Any:
    """Return the text of a user's identifier; clients also send numbers."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


User = Annotated[str, BeforeValidator(_user_text, json_schema_input_type=Any)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stop_list, json_schema_input_type=StopText | list[StopText]),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class StreamOptions(ClosedModel):
    """Options of a streaming response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Report the usage so far in every chunk, as in vLLM."""
    include_obfuscation: bool = False
    """Random padding against side channels, as in OpenAI. Accepted for OpenAI's clients; no padding is sent."""


class GenerationRequest(RequestBody):
    """Fields common to all generation requests.

    Defaults are those of OpenAI. Fields that OpenAI does not have are named and interpreted as in vLLM.
    """

    model: str
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    """Minimum number of output tokens; stop strings that end in the text of these tokens are ignored."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=1e-5, le=2)
    """As in vLLM, which takes every number above 0. Logits divided by a tiny one overflow."""
    logit_bias: dict[BiasedToken, Bias] = Field(
        default={}, max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}
    )
    bad_words: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=MAX_BAD_WORDS)
    """Texts that the answer must not contain."""
    allowed_token_ids: list[TokenId] | None = Field(default=None, min_length=1, max_length=MAX_BIASES)
    """The only tokens of the answer, as in vLLM. It ends by itself only if an end token is among them."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """Number of tokens at the end of the prompt to keep, as in vLLM; -1 keeps as many as fit."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stops = Field(default=[])
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_CACHE_SALT)
    """Salt of the prefix cache, as in vLLM: only requests with the same salt share cached prefixes."""
    user: User | None = None
    """Identifier of the end user. Captured requests hold its hash, by which they can be deleted."""
    response_format: ResponseFormat | None = None
    """Format of the answer, as in OpenAI's API: text, any JSON object, or JSON of a schema."""
    structured_outputs: StructuredOutputs | None = None
    """Grammar of the answer, as in vLLM."""
    metadata: dict[str, Any] = Field(default={})
    """Free-form metadata: ``task`` labels the request; ``capture`` set to false excludes it from traffic capture."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _are_few(cls, biases: Any) -> Any:
        """Refuse too many entries before each of them is checked, and named if it is wrong."""
        if isinstance(biases, dict) and len(biases) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} tokens can have a bias, got {len(biases)}")
        return biases

    @property
    def text(self) -> str:
        """Text of all prompts or messages; token ids have none."""
        raise NotImplementedError

    @property
    def prompt_count(self) -> int:
        """Number of prompts; a conversation is one."""
        return 1

    @property
    def token_limit(self) -> int | None:
        """Largest number of output tokens that the client requests; None for no limit."""
        return self.max_tokens

    @property
    def generates(self) -> bool:
        """False if only the echo of the prompt is returned."""
        return self.max_tokens != 0

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of top log-probabilities per output token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def has_format(self) -> bool:
        """True if a field prescribes the format of the answer."""
        formatted = self.response_format is not None and self.response_format.type != "text"
        return formatted or self.structured_outputs is not None

    @property
    def prescribes_answer(self) -> bool:
        """True if a field other than ``bad_words`` needs a grammar of the answer."""
        return self.has_format

    def _check_token_rules(self) -> None:
        """Raise BadRequest for bad_words or allowed_token_ids with fields that they cannot be combined with."""
        formatted = {"another format of the answer": self.prescribes_answer}
        for name, others in (
            ("bad_words", {"ignore_eos": self.ignore_eos, **formatted}),
            ("allowed_token_ids", {"bad_words": self.bad_words, **formatted}),
        ):
            if getattr(self, name) and (other := next((what for what, given in others.items() if given), None)):
                raise unsupported(f"{name} and {other} are not supported together; leave one out", name)

    @property
    def task(self) -> str | None:
        """Task label that the client set in ``metadata``."""
        label = self.metadata.get("task")
        return label if isinstance(label, str) else None

    def check(self) -> None:
        """Raise BadRequest for stream_options without stream, or min_tokens above the token limit."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.structured_outputs is not None:
            self.structured_outputs.check()
            if self.response_format is not None and self.response_format.type != "text":
                raise invalid_value("response_format and structured_outputs exclude each other", "structured_outputs")
        self._check_token_rules()
        if self.truncate_prompt_tokens == 0:
            raise invalid_value("truncate_prompt_tokens must be -1, or at least 1", "truncate_prompt_tokens")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise invalid_value(
                f"min_tokens is {self.min_tokens}, above the limit of {self.token_limit} tokens", "min_tokens"
            )


# Request body of /v1/chat/completions.

# Chat templates use the older name that OpenAI had for the role.
_RENDERED_ROLES = {"developer": "system"}
_TAKEN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class TextPart(RequestModel):
    """Part of a message content; only text is supported."""

    type: Literal["text"]
    text: str


def _content(value: Any) -> Any:
    """Check the parts of content. OpenAI also accepts null."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"only parts of type 'text' are supported, got {kind!r:.40}")
    return value


def _calls(value: Any) -> Any:
    """Return earlier calls. Clients that send back a message of a response send null for none."""
    return [] if value is None else value


class ChatMessage(RequestModel):
    """One turn of the conversation. Content is required, except for an assistant's turn with tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart], BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)
    ] = ""
    name: str | None = None
    reasoning_content: Any = None
    """Thinking of an earlier turn, for the template. Other servers name it ``reasoning``."""
    reasoning: Any = None
    tool_calls: Annotated[list[ToolCall], FailFast(), BeforeValidator(_calls)] = Field(default=[])
    tool_call_id: str | None = None
    function_call: Any = None
    """Call in the form before ``tool_calls``, which is refused."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.function_call is not None:
            raise ValueError("function_call is not supported; send tool_calls")
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
            }

        calls = turn(["assistant"], ["tool_calls"], "content", "name")
        calls["properties"]["tool_calls"] = {**fields["tool_calls"], "minItems": 1}
        said = turn(["system", "developer", "user", "assistant"], ["content"], "name")
        result = turn(["tool"], ["content", "tool_call_id"], "name")
        result["properties"]["tool_call_id"] = {"type": "string"}
        return {"anyOf": [said, calls, result]}

    @property
    def text(self) -> str:
        """Content as one text, of which each part has lines of its own."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    def rendered(self) -> dict[str, Any]:
        """Return the message for the chat template.

        Templates test the presence of ``tool_calls``, so an empty list is left out.
        """
        parts = self.content if isinstance(self.content, str) else [part.model_dump() for part in self.content]
        message: dict[str, Any] = {"role": _RENDERED_ROLES.get(self.role, self.role), "content": parts}
        thoughts = (one for one in (self.reasoning_content, self.reasoning) if isinstance(one, str))
        if (thought := next(thoughts, None)) is not None:
            message |= {"reasoning_content": thought, "thinking": thought}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


MAX_MESSAGES = 4096
"""Most messages of a conversation, together with the parts of their contents and their tool calls.

They are checked on the event loop, and each holds a kilobyte or more while its request waits.
"""


def _few_messages(messages: Any) -> Any:
    """Refuse too many messages, parts and tool calls before each of them is checked."""
    if isinstance(messages, list):
        turns = [one for one in messages[:MAX_MESSAGES] if isinstance(one, dict)]
        lists = [turn.get(name) for turn in turns for name in ("content", "tool_calls")]
        if len(messages) + sum(len(one) for one in lists if isinstance(one, list)) > MAX_MESSAGES:
            raise ValueError(f"at most {MAX_MESSAGES} messages, parts of content and tool calls are supported together")
    return messages


Messages = Annotated[list[ChatMessage], Field(min_length=1), FailFast(), BeforeValidator(_few_messages)]


class ConversationRequest(RequestBody):
    """Messages and what else a chat template renders."""

    messages: Messages
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    add_special_tokens: bool = False
    """Add the special tokens of the tokenizer to the rendered template, which has its own."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Further variables of the chat template, as in vLLM."""
    add_generation_prompt: bool = True
    """Render the start of the assistant's turn."""
    continue_final_message: bool = False
    """Continue the last message instead; ``add_generation_prompt`` must be false."""

    @property
    def text(self) -> str:
        """Text of all messages."""
        return "\n".join(message.text for message in self.messages)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Tools for the chat template."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def rendered(self) -> dict[str, Any]:
        """Return the arguments of `ChatTemplate.render`."""
        return {
            "messages": [message.rendered() for message in self.messages],
            "tools": self.shown_tools,
            "variables": self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    def check(self) -> None:
        """Raise BadRequest if the last message is to be continued, and followed by another turn or without text."""
        super().check()
        if self.continue_final_message and (self.add_generation_prompt or not self.messages[-1].text):
            raise invalid_value(
                "continue_final_message needs add_generation_prompt to be false, and a last message with content",
                "continue_final_message",
            )


class ChatRequest(ConversationRequest, GenerationRequest):
    """Request for the next turn of a conversation."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False keeps the first tool call of a choice and drops the others."""

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
        return [] if self.tool_choice == "none" else super().shown_tools

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

    @property
    def prescribes_answer(self) -> bool:
        """True if a format or calls need a grammar of the answer."""
        return self.has_format or self.guides_calls

    def _check_tool_choice(self) -> None:
        """Raise BadRequest for a tool_choice without the tool, or for strict functions together with another format."""
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise invalid_value("tool_choice needs a function that tools has", "tool_choice")
        if self.has_strict_tools and not self.forced_tools and self.has_format:
            raise unsupported(
                "functions with strict and another format of the answer are not supported together; leave out strict, "
                "or set tool_choice to 'required' or 'none'", "tools",
            )  # fmt: skip

    def check(self) -> None:
        """Raise BadRequest for invalid or unsupported combinations of logprobs, tools and template variables."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs needs logprobs to be true", "top_logprobs")
        self._check_tool_choice()
        if taken := sorted(self.chat_template_kwargs.keys() & _TAKEN_VARIABLES):
            raise BadRequest(f"chat_template_kwargs must not set {taken[0]}", param="chat_template_kwargs")


# Request body of /v1/completions.

MAX_PROMPTS = 64
_DEFAULT_TOKENS = 16


def _prompt_list(value: Any) -> Any:
    """Convert a text, a list of token ids, or a list of either to a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) == {int}):
        return [value]
    if not isinstance(value, list) or not set(map(type, value)) <= {str, list}:
        raise ValueError("must be a text, a list of token ids, or a list of either")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, got {len(value)}")
    prompts = [_whole(item) for item in value]
    if any(isinstance(item, list) and not set(map(type, item)) <= {int} for item in prompts):
        raise ValueError("token ids must be integers")
    return prompts


Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompts = Annotated[
    list[str | list[int]],
    Field(min_length=1, max_length=MAX_PROMPTS),
    BeforeValidator(
        _prompt_list,
        json_schema_input_type=Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=MAX_PROMPTS)],
    ),
]


class CompletionRequest(GenerationRequest):
    """Request for the continuation of one or more prompts."""

    prompt: Prompts
    max_tokens: int | None = Field(default=_DEFAULT_TOKENS, ge=0)
    """Largest number of output tokens. 0 is valid only with ``echo``, to get the log-probabilities of the prompt."""
    echo: bool = False
    add_special_tokens: bool = True
    """Encode texts with the special tokens (such as BOS) of the tokenizer. False is for prompts that have them."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def text(self) -> str:
        """Prompts that are texts."""
        return "\n".join(prompt for prompt in self.prompt if isinstance(prompt, str))

    @property
    def prompt_count(self) -> int:
        """Number of prompts."""
        return len(self.prompt)

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of top log-probabilities per token; None for no log-probabilities."""
        return self.logprobs

    def check(self) -> None:
        """Raise BadRequest for max_tokens 0 without echo."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise invalid_value("max_tokens may be 0 only with echo", "max_tokens")


# Request body of PUT /v1/draft on the admin port, which replaces a draft.


class NewDraft(Written):
    """New draft, and the name of the draft that it replaces. ``method`` defaults to a head in EAGLE-3's format."""

    method: Method = "eagle3"
    uri: str | None = Field(default=None, max_length=1024)
    name: str = Field(default="", pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", max_length=32)
    """Name of the draft to replace; empty for the default draft."""
    quantization: DraftQuantization | None = None
    """Quantization of the weights of its MLPs and lm_head. None leaves them in the target's dtype."""
    placement: Placement = "shared"
    """Device of the draft; ``own`` needs one that neither the target nor another process uses."""
    expected_hash: str | None = Field(default=None, min_length=1, max_length=64)
    """Hash that the files must have; with another one the swap is refused. None accepts any."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        try:
            self.config()
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return self

    def config(self) -> DraftConfig:
        """Return the configuration of the draft, as a required draft: one that does not fit the target is an error."""
        return DraftConfig(**self.model_dump(exclude={"name", "expected_hash"}), required=True)


# Request bodies of /tokenize and /detokenize, with the fields of vLLM.


class TokenizeRequest(RequestBody):
    """Request for the token ids of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ConversationRequest):
    """Request for the token ids of a conversation, rendered by the chat template."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody):
    """Request for the text of token ids, special tokens included."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


# Request body of the admin route that deletes the captured requests of a user.


class UserDeletion(Written):
    """User whose records are deleted: the value of the field ``user`` of the requests."""

    user: User = Field(min_length=1)


# Parser of request bodies: JSON to a validated request, or a BadRequest that names the field at fault.

Request = TypeVar("Request", bound=RequestBody)
Model = TypeVar("Model", bound=BaseModel)


def parse(kind: type[Request], body: bytes) -> Request:
    """Parse and validate a JSON request body. Raises BadRequest that names the field at fault."""
    return build(kind, read_object(body))


def build(kind: type[Request], fields: dict[str, Any]) -> Request:
    """Validate the fields of a request. Raises BadRequest that names the field at fault."""
    try:
        request = kind.model_validate(drop_neutral_fields(fields, kind.model_fields))
    except ValidationError as error:
        raise bad_request(error, fields) from None
    request.check()
    return request


def parse_contract(kind: type[Model], body: bytes) -> Model:
    """Parse and validate a model of the package `contract`. Raises BadRequest that names the field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from None


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises BadRequest for invalid JSON or another type."""
    try:
        parsed = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return parsed


_ENDS_WITH_NAME = frozenset({"missing", "extra_forbidden"})
"""Types of errors whose location ends with the name of a field, also if the client did not send it."""


def bad_request(error: ValidationError, sent: Any = None) -> BadRequest:
    """Convert a validation error of pydantic into an error with OpenAI's codes.

    Args:
        error: The error. Its first problem is reported; of the alternatives of a field, the one that fits best.
        sent: Object that the client sent; None if its paths are those of the model.
    """
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = details[0]
    location = first["loc"]
    if sent is not None and (location := _sent_location(first, sent)) != first["loc"]:
        alternatives = [one for one in details if one["loc"][:1] == first["loc"][:1]]
        first = max(alternatives, key=lambda one: len(_sent_location(one, sent)))
        location = _sent_location(first, sent)
    param = _path(location)
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unrecognized field: {param}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return BadRequest(f"missing required field: {param}", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return BadRequest(f"invalid {param}: {message}" if param else message, param=param or None, code="invalid_value")


def _sent_location(detail: pydantic_core.ErrorDetails, sent: Any) -> tuple[int | str, ...]:
    """Return a location in the object that the client sent, which has no labels of the alternatives of a field."""
    location = detail["loc"]
    found: list[int | str] = []
    for index, part in enumerate(location):
        is_key = isinstance(sent, dict) and part in sent
        is_index = isinstance(sent, list) and isinstance(part, int) and part < len(sent)
        if is_key or is_index:
            sent = sent[part]
        elif index < len(location) - 1 or detail["type"] not in _ENDS_WITH_NAME:
            continue
        found.append(part)
    return tuple(found)


def _path(location: tuple[int | str, ...]) -> str:
    """Format an error location: ("messages", 0, "content") becomes "messages[0].content"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
