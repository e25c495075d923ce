"""Request bodies of /tokenize and /detokenize, with the fields of vLLM."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from specdecode_worker.server.requests.base import RequestModel, TokenId
from specdecode_worker.server.requests.chat import Messages
from specdecode_worker.server.requests.tools import MAX_TOOLS, Tool


class TokenizeRequest(RequestModel):
    """Request for the token ids of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(RequestModel):
    """Request for the token ids of a conversation, rendered by the chat template."""

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    return_token_strs: bool = False
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] = Field(default={})


class DetokenizeRequest(RequestModel):
    """Request for the text of token ids, special tokens included."""

    model: str | None = None
    tokens: list[TokenId]
