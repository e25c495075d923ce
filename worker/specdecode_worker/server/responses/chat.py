"""Responses of /v1/chat/completions: text, and tool calls if the request offers tools."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdecode_worker.server.responses.logprobs import chat_logprobs
from specdecode_worker.server.responses.objects import Choice, ChoicePiece, ScoredToken
from specdecode_worker.server.responses.writer import Json, ResponseContext, ResponseWriter
from specdecode_worker.server.tools.deltas import ArgumentsDelta, CallStart, Delta, TextDelta, ToolParser, text_deltas


@dataclass(frozen=True, slots=True)
class ToolCallOptions:
    """Options of tool call parsing: a parser factory, and ``parallel``; if false, only the first call is kept."""

    parser: Callable[[], ToolParser]
    parallel: bool = True


class ChatWriter(ResponseWriter):
    """Formatter of chat completion objects. Each choice is one turn of the assistant."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, context: ResponseContext, tools: ToolCallOptions | None = None) -> None:
        super().__init__(context)
        self._tools = tools
        self._turns: dict[int, _Turn] = {}

    @property
    def holds_back_text(self) -> bool:
        """True if the request offers tools."""
        return self._tools is not None

    def opening(self, index: int) -> Json | None:
        """Return the first chunk of a choice, which has the role."""
        return self._part(index, {"role": "assistant", "content": ""}, (), None)

    def chunks(self, index: int, piece: ChoicePiece) -> list[Json]:
        """Return the chunks for a piece.

        The list is empty while the parser holds back the text; its log-probabilities then go into the next chunk.
        """
        if (turn := self._turns.get(index)) is None:
            turn = self._turns[index] = self._turn(index)
        deltas: list[Json] = turn.read(piece.text, last=piece.finish_reason is not None)
        scored = (*turn.unsent, *piece.scored)
        if piece.finish_reason is None and not deltas:
            turn.unsent = scored
            return []
        turn.unsent = ()
        chunks = [self._part(index, delta, scored if i == 0 else (), None) for i, delta in enumerate(deltas or [{}])]
        if piece.finish_reason is not None:
            chunks[-1]["choices"][0]["finish_reason"] = turn.reason(piece.finish_reason)
        return chunks

    def _choice(self, index: int, choice: Choice) -> Json:
        turn = self._turn(index)
        turn.read(choice.text, last=True)
        return {
            "index": index,
            "message": turn.message(),
            "logprobs": self._logprobs(choice.scored),
            "finish_reason": turn.reason(choice.finish_reason),
        }

    def _turn(self, index: int) -> _Turn:
        return _Turn(self._tools, f"{self._context.request_id}/{index}")

    def _part(self, index: int, delta: Json, scored: Sequence[ScoredToken], finish_reason: str | None) -> Json:
        logprobs = self._logprobs(scored) if scored else None
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return chat_logprobs(scored, self._context.vocabulary) if self._context.logprobs else None


class _Turn:
    """State of one choice: separates the text into content and tool calls, and collects the message."""

    def __init__(self, tools: ToolCallOptions | None, identity: str) -> None:
        """Start with empty text. ``identity`` distinguishes the choice from all others; call ids depend on it."""
        self._identity = identity
        self._parser = tools.parser() if tools is not None else None
        self._most_calls = None if tools is None or tools.parallel else 1
        self._text = ""
        self._calls: list[Json] = []
        self._dropping = False
        self.unsent: tuple[ScoredToken, ...] = ()
        """Scored tokens that are not sent yet, because the parser holds back their text."""

    def read(self, text: str, *, last: bool) -> list[Json]:
        """Return OpenAI's deltas for new text; ``last`` ends the text."""
        if self._parser is None:
            deltas: list[Delta] = text_deltas(text)
        else:
            deltas = self._parser.push(text) + (self._parser.end() if last else [])
        return [delta_json for delta in deltas if (delta_json := self._to_json(delta)) is not None]

    def message(self) -> Json:
        """Return the complete message of the assistant."""
        message: Json = {"role": "assistant", "content": self._text, "refusal": None}
        if self._calls:
            message |= {"content": self._text or None, "tool_calls": self._calls}
        return message

    def reason(self, finish_reason: str) -> str:
        """Return OpenAI's finish reason: "tool_calls" instead of "stop" if the turn has calls."""
        return "tool_calls" if self._calls and finish_reason == "stop" else finish_reason

    def _to_json(self, delta: Delta) -> Json | None:
        match delta:
            case TextDelta(text):
                self._text += text
                return {"content": text}
            case CallStart(name):
                return self._begin(name)
            case ArgumentsDelta(text):
                return None if self._dropping else self._append_arguments(text)

    def _begin(self, name: str) -> Json | None:
        """Start a tool call; None if it is dropped because parallel calls are off."""
        self._dropping = self._most_calls is not None and len(self._calls) >= self._most_calls
        if self._dropping:
            return None
        call: Json = {"id": _call_id(self._identity, len(self._calls)), "type": "function"}
        self._calls.append(call | {"function": {"name": name, "arguments": ""}})
        index = len(self._calls) - 1
        return {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}

    def _append_arguments(self, text: str) -> Json:
        self._calls[-1]["function"]["arguments"] += text
        return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": text}}]}


def _call_id(identity: str, index: int) -> str:
    """Return the id of call ``index`` of a choice. It is the same on every worker that continues the choice."""
    return f"call_{hashlib.blake2b(f'{identity}/{index}'.encode(), digest_size=12).hexdigest()}"
