"""OpenAI's response objects, as plain dicts in the order in which OpenAI writes them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one answer took; ``drafts`` is steps with a draft, ``accepted`` the draft tokens that were kept."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafts: int
    draft_tokens: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished answer."""

    text: str
    finish_reason: str
    statistics: Statistics


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage(statistics: Iterable[Statistics]) -> Json:
    found = list(statistics)
    prompt, completion = sum(s.prompt_tokens for s in found), sum(s.completion_tokens for s in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in found)},
    }


def metrics(statistics: Iterable[Statistics]) -> Json:
    """Per-request statistics under vLLM's names."""
    found = list(statistics)
    drafts, accepted = sum(s.drafts for s in found), sum(s.accepted for s in found)
    draft_tokens = sum(s.draft_tokens for s in found)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            "draft_acceptance_rate": accepted / draft_tokens if draft_tokens else 0.0,
            "num_drafts": drafts,
            "num_draft_tokens": draft_tokens,
            "num_accepted_tokens": accepted,
        }
    }


class Format:
    """How one route writes its answers: the head that every object of one answer shares, and its choices."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str) -> None:
        self._head: Json = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[Choice]) -> Json:
        """The answer of a request that does not stream."""
        statistics = [choice.statistics for choice in choices]
        return {
            **self._named(self.kind),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(statistics),
            "metrics": metrics(statistics),
        }

    def opening(self, index: int) -> Json | None:
        """The chunk before any text, if this route has one."""
        return None

    def chunk(self, index: int, text: str, finish_reason: str | None) -> Json:
        return {**self._named(self.chunk_kind), "choices": [self._chunk_choice(index, text, finish_reason)]}

    def closing(self, statistics: list[Statistics]) -> Json:
        """The chunk with the usage of the whole stream."""
        return {
            **self._named(self.chunk_kind),
            "choices": [],
            "usage": usage(statistics),
            "metrics": metrics(statistics),
        }

    def _named(self, kind: str) -> Json:
        return {"id": self._head["id"], "object": kind, "created": self._head["created"], "model": self._head["model"]}

    def _choice(self, index: int, choice: Choice) -> Json:
        raise NotImplementedError

    def _chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        raise NotImplementedError


class CompletionFormat(Format):
    """/v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, choice: Choice) -> Json:
        return self._chunk_choice(index, choice.text, choice.finish_reason)

    def _chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatFormat(Format):
    """/v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._named(self.chunk_kind), "choices": [choice]}

    def _choice(self, index: int, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}

    def _chunk_choice(self, index: int, text: str, finish_reason: str | None) -> Json:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
