"""Request body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.requests.base import TokenId
from specdecode_worker.server.requests.common import MAX_CHOICES, MAX_LOGPROBS, GenerationRequest

MAX_PROMPTS = 64
_DEFAULT_TOKENS = 16


def _prompt_list(value: Any) -> Any:
    """Convert a text, a list of token ids, or a list of either to a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str | list) for item in value):
        raise ValueError("must be a text, a list of token ids, or a list of either")
    for item in value:
        if isinstance(item, list) and not all(type(token) is int for token in item):
            raise ValueError("token ids must be integers")
    return value


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
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of top log-probabilities per token; None for no log-probabilities."""
        return self.logprobs

    @property
    def generated_choices(self) -> int:
        """Number of choices that are generated for each prompt; the ``n`` best of them are returned."""
        return self.best_of or self.n

    def check(self) -> None:
        """Raise BadRequest for invalid combinations of n, best_of, stream, echo and max_tokens."""
        super().check()
        if self.generated_choices < self.n:
            raise BadRequest(f"best_of is below n, which is {self.n}", param="best_of", code="invalid_value")
        if self.generated_choices > self.n and self.stream:
            raise BadRequest(
                "best_of compares whole answers, so it cannot stream", param="best_of", code="invalid_value"
            )
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens may be 0 only with echo", param="max_tokens", code="invalid_value")
