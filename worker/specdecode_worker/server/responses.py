"""OpenAI response objects as plain dicts with the fields in their order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec

from specdecode_worker.core.messages import Logprobs
from specdecode_worker.server.tools import (
    Delta,
    ReasoningParser,
    ToolParser,
    Vocabulary,
    WrittenCall,
    text_deltas,
)

# Parts of a response, before they are formatted for a route.


@dataclass(frozen=True, slots=True)
class ChoiceStatistics:
    """Token and speculation counts of one choice. ``acceptance`` is that of `ChoiceCounters`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    acceptance: Sequence[int]
    counts_prompt: bool = True
    """False for the further choices of a prompt, so that its tokens count once in the usage."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Token with its log-probabilities and the character ``offset`` at which it begins in the returned text.

    The first token of a prompt has no log-probabilities, because no token precedes it.
    """

    token: int
    offset: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """New text of a choice, with its scored tokens if log-probabilities are requested.

    Only the last piece of a choice has a ``finish_reason``.
    """

    text: str
    finish_reason: str | None
    scored: tuple[ScoredToken, ...] = ()

    @property
    def is_shown(self) -> bool:
        """True if the piece changes the response."""
        return bool(self.text or self.scored or self.finish_reason)


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """Finished choice."""

    text: str
    finish_reason: str
    statistics: ChoiceStatistics
    scored: tuple[ScoredToken, ...] = ()


# Usage and speculation statistics over all choices of one request.


def usage(statistics: Iterable[ChoiceStatistics]) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    per_choice = list(statistics)
    once = [s for s in per_choice if s.counts_prompt]
    prompt, completion = sum(s.prompt_tokens for s in once), sum(s.completion_tokens for s in per_choice)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in once)},
    }


def metrics(statistics: Iterable[ChoiceStatistics], num_spec_tokens: int) -> dict[str, Any]:
    """Return the speculation statistics of the request in vLLM's fields.

    Args:
        statistics: Those of each choice.
        num_spec_tokens: Depth of the plan's deepest draft. A request with deeper drafts, of an earlier plan or an
            exploration, has the depth that it accepted instead, because the histogram ends there.
    """
    per_choice = list(statistics)
    rows = [(0,) * (num_spec_tokens + 1), *(s.acceptance for s in per_choice)]
    histogram = [sum(counts) for counts in zip_longest(*rows, fillvalue=0)]
    steps, accepted = sum(histogram), sum(depth * count for depth, count in enumerate(histogram))
    draft_tokens = sum(s.draft_tokens for s in per_choice)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / draft_tokens if draft_tokens else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": draft_tokens,
            "num_spec_tokens": len(histogram) - 1,
        }
    }


# Log-probability objects of chat and completion responses.
#
# Log-probabilities are those of the raw distribution of the model, before temperature, truncation and penalties, as in
# vLLM and OpenAI. So they do not depend on speculation or on the sampling parameters.

# Value that OpenAI uses for very unlikely tokens, because JSON has no infinity.
_LEAST = -9999.0


def chat_logprobs(scored: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return {"content": [{token, logprob, bytes, top_logprobs}]} of a chat response.

    ``bytes`` is exact also for a token that is an incomplete character.
    """
    return {"content": [_chat_token(one, vocabulary) for one in scored], "refusal": None}


def completion_logprobs(scored: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return four lists of equal length. ``top_logprobs`` has the most likely tokens and the sampled token."""
    return {
        "text_offset": [one.offset for one in scored],
        "token_logprobs": [None if one.logprobs is None else _bounded(one.logprobs.logprob) for one in scored],
        "tokens": [_name(one.token, vocabulary) for one in scored],
        "top_logprobs": [
            None if one.logprobs is None else {_name(token, vocabulary): value for token, value in _all(one)}
            for one in scored
        ],
    }


def _chat_token(one: ScoredToken, vocabulary: Vocabulary) -> dict[str, Any]:
    assert one.logprobs is not None, "chat echoes no prompt"
    top = zip(one.logprobs.top_tokens, one.logprobs.top_logprobs, strict=True)
    return {
        **_entry(one.token, one.logprobs.logprob, vocabulary),
        "top_logprobs": [_entry(token, value, vocabulary) for token, value in top],
    }


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    token_bytes = vocabulary.bytes_of(token)
    return {"token": token_bytes.decode(errors="replace"), "logprob": _bounded(logprob), "bytes": list(token_bytes)}


def _all(one: ScoredToken) -> Iterator[tuple[int, float]]:
    """Yield (token id, log-probability) of the most likely tokens, and of the sampled token if it is not among them."""
    assert one.logprobs is not None
    for token, value in zip(one.logprobs.top_tokens, one.logprobs.top_logprobs, strict=True):
        yield token, _bounded(value)
    if one.token not in one.logprobs.top_tokens:
        yield one.token, _bounded(one.logprobs.logprob)


def _name(token: int, vocabulary: Vocabulary) -> str:
    """Return the text of a token.

    An incomplete character is written as "bytes:" and hexadecimal escapes, as in OpenAI, so that keys are unique.
    """
    token_bytes = vocabulary.bytes_of(token)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _bounded(logprob: float) -> float:
    return max(logprob, _LEAST)


# Base of the response formatters: the fields that all objects of one response share, and event encoding.

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    """Return ``body`` encoded as one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Facts about the request that its response needs in addition to the text."""

    request_id: str
    model: str
    fingerprint: str
    """Fingerprint of the weights and the program, which can change the text of a seeded request."""
    vocabulary: Vocabulary
    logprobs: bool
    """True if the request asks for log-probabilities."""
    created: int = 0
    """Unix time of the response in seconds."""
    num_spec_tokens: int = 0
    """Depth of the plan's deepest draft."""


class ResponseWriter:
    """Formatter of one response; each route has a subclass."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, context: ResponseContext) -> None:
        self.context = context

    @property
    def holds_back_text(self) -> bool:
        """True if chunks can lack text whose meaning is uncertain."""
        return False

    def whole(self, choices: Sequence[FinishedChoice]) -> Json:
        """Return the response to a request that does not stream."""
        return {
            **self._named(self.kind),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            **self._counts([choice.statistics for choice in choices]),
        }

    def begin(self, prompt: Sequence[int]) -> None:
        """Prepare for the answer to a prompt, whose end says how the answer is to be read."""

    def opening(self, index: int) -> Json | None:
        """Return the chunk before any text; None if the route has none."""
        return None

    def chunks(self, index: int, piece: ChoicePiece) -> list[Json]:
        """Return the chunks for a piece of one choice; empty while its meaning is uncertain (text or tool call)."""
        raise NotImplementedError

    def closing(self, statistics: Sequence[ChoiceStatistics]) -> Json:
        """Return the last chunk, which has the usage of the whole stream."""
        return {**self._named(self.chunk_kind), "choices": [], **self._counts(statistics)}

    def _counts(self, statistics: Sequence[ChoiceStatistics]) -> Json:
        return {"usage": usage(statistics), "metrics": metrics(statistics, self.context.num_spec_tokens)}

    def _chunk(self, choice: Json) -> Json:
        return {**self._named(self.chunk_kind), "choices": [choice]}

    def _named(self, kind: str) -> Json:
        return {
            "id": f"{self.prefix}-{self.context.request_id}",
            "object": kind,
            "created": self.context.created,
            "model": self.context.model,
            "system_fingerprint": self.context.fingerprint,
        }

    def _choice(self, index: int, choice: FinishedChoice) -> Json:
        raise NotImplementedError

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        raise NotImplementedError


# Responses of /v1/chat/completions: text, and tool calls if the request offers tools.


@dataclass(frozen=True, slots=True)
class ToolCallOptions:
    """Options of tool call parsing."""

    parser: Callable[[], ToolParser]
    parallel: bool = True
    """False keeps the first call only."""
    named: bool = False
    """True if the request names the function to call. The turn then ends as text does, as with OpenAI."""


ReasoningOf = Callable[[Sequence[int]], Callable[[], ReasoningParser]]
"""Function from the ids of a prompt to a function that makes parsers of thinking."""


class ChatWriter(ResponseWriter):
    """Formatter of chat completion objects. Each choice is one turn of the assistant."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, context: ResponseContext, tools: ToolCallOptions | None = None, reasoning: ReasoningOf | None = None
    ) -> None:
        super().__init__(context)
        self._tools, self._reasoning_of = tools, reasoning
        self._reasoning: Callable[[], ReasoningParser] | None = None
        self._turns: dict[int, _Turn] = {}

    @property
    def holds_back_text(self) -> bool:
        """True if the request offers tools, or answers can begin with thinking."""
        return self._tools is not None or self._reasoning_of is not None

    def begin(self, prompt: Sequence[int]) -> None:
        """Choose how to read the beginning of the answer."""
        if self._reasoning_of is not None:
            self._reasoning = self._reasoning_of(prompt)

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

    def _choice(self, index: int, choice: FinishedChoice) -> Json:
        turn = self._turn(index)
        return {
            "index": index,
            "message": turn.message(turn.read(choice.text, last=True)),
            "logprobs": self._logprobs(choice.scored),
            "finish_reason": turn.reason(choice.finish_reason),
        }

    def _turn(self, index: int) -> _Turn:
        return _Turn(self._tools, self._reasoning, f"{self.context.request_id}/{index}")

    def _part(self, index: int, delta: Json, scored: Sequence[ScoredToken], finish_reason: str | None) -> Json:
        logprobs = self._logprobs(scored) if scored else None
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return chat_logprobs(scored, self.context.vocabulary) if self.context.logprobs else None


class _Turn:
    """State of one choice: separates the text into thinking, content and tool calls."""

    def __init__(
        self, tools: ToolCallOptions | None, reasoning: Callable[[], ReasoningParser] | None, identity: str
    ) -> None:
        """Start with empty text. ``identity`` distinguishes the choice from all others; call ids depend on it."""
        self._identity = identity
        self._reasoning = None if reasoning is None else reasoning()
        self._parser = tools.parser() if tools is not None else None
        self._most_calls = None if tools is None or tools.parallel else 1
        self._reason_of_calls = "stop" if tools is not None and tools.named else "tool_calls"
        self._calls: list[Json] = []
        self.unsent: tuple[ScoredToken, ...] = ()
        """Scored tokens that are not sent yet, because the parser holds back their text."""

    def read(self, text: str, *, last: bool) -> list[Json]:
        """Return OpenAI's deltas for new text; ``last`` ends the text."""
        thought, text = ("", text) if self._reasoning is None else self._reasoning.push(text, last=last)
        if self._parser is None:
            deltas: list[Delta] = text_deltas(text)
        else:
            deltas = self._parser.push(text) + (self._parser.end() if last else [])
        read = [delta_json for delta in deltas if (delta_json := self._to_json(delta)) is not None]
        return [{"reasoning_content": thought}, *read] if thought else read

    def message(self, deltas: Sequence[Json]) -> Json:
        """Return the message of the assistant that all deltas of the choice are parts of."""
        text, thought = ("".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content"))
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._reasoning is not None:
            message |= {"content": text or None, "reasoning_content": thought or None}
        if self._calls:
            message |= {"content": text or None, "tool_calls": self._calls}
        return message

    def reason(self, finish_reason: str) -> str:
        """Return OpenAI's finish reason: "tool_calls" instead of "stop" if the model chose to call."""
        return self._reason_of_calls if self._calls and finish_reason == "stop" else finish_reason

    def _to_json(self, delta: Delta) -> Json | None:
        """Return OpenAI's delta; None for a call that is dropped because parallel calls are off."""
        if not isinstance(delta, WrittenCall):
            return {"content": delta}
        index = len(self._calls)
        if self._most_calls is not None and index >= self._most_calls:
            return None
        function = {"name": delta.name, "arguments": delta.arguments}
        call: Json = {"id": _call_id(self._identity, index), "type": "function", "function": function}
        self._calls.append(call)
        return {"tool_calls": [{"index": index, **call}]}


def _call_id(identity: str, index: int) -> str:
    """Return the id of call ``index`` of a choice. It is the same on every worker that continues the choice."""
    return f"call_{hashlib.blake2b(f'{identity}/{index}'.encode(), digest_size=12).hexdigest()}"


# Responses of /v1/completions.


class CompletionWriter(ResponseWriter):
    """Formatter of text completion objects."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def chunks(self, index: int, piece: ChoicePiece) -> list[Json]:
        """Return one chunk for a piece."""
        return [self._chunk(self._text(index, piece.text, piece.scored, piece.finish_reason))]

    def _choice(self, index: int, choice: FinishedChoice) -> Json:
        return self._text(index, choice.text, choice.scored, choice.finish_reason)

    def _text(self, index: int, text: str, scored: Sequence[ScoredToken], finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(scored), "finish_reason": finish_reason}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return completion_logprobs(scored, self.context.vocabulary) if self.context.logprobs else None
