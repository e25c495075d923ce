"""Fields that completion and chat requests share."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.requests.base import RequestModel, TokenId
from specdecode_worker.server.requests.structured_outputs import ResponseFormat, StructuredOutputs

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_CACHE_SALT = 256


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _user_text(value: Any) -> Any:
    """Return the text of a user's identifier; clients also send numbers."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


User = Annotated[str, BeforeValidator(_user_text, json_schema_input_type=Any)]
StopText = Annotated[str, Field(min_length=1)]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stop_list, json_schema_input_type=StopText | list[StopText]),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class StreamOptions(RequestModel):
    """Options of a streaming response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Report the usage so far in every chunk, as in vLLM."""
    include_obfuscation: bool = False
    """Random padding against side channels, as in OpenAI. Accepted for OpenAI's clients; no padding is sent."""


class GenerationRequest(RequestModel):
    """Fields common to all generation requests.

    Defaults are those of OpenAI. Fields that OpenAI does not have are named and interpreted as in vLLM.
    """

    model: str
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    logit_bias: dict[BiasedToken, Bias] = Field(
        default={}, max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}
    )
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

    @property
    def token_limit(self) -> int | None:
        """Largest number of output tokens that the client requests; None for no limit."""
        return self.max_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of top log-probabilities per output token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def generated_choices(self) -> int:
        """Number of choices that are generated for each prompt."""
        return self.n

    @property
    def has_format(self) -> bool:
        """True if a field prescribes the format of the answer."""
        formatted = self.response_format is not None and self.response_format.type != "text"
        return formatted or self.structured_outputs is not None

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
                raise BadRequest(
                    "response_format and structured_outputs exclude each other", param="structured_outputs",
                    code="invalid_value",
                )  # fmt: skip
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise BadRequest(
                f"min_tokens is {self.min_tokens}, above the limit of {self.token_limit} tokens",
                param="min_tokens",
                code="invalid_value",
            )
