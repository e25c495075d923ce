"""Tokenized prompts of completion and chat requests, with the text to echo."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.engine.ipc.messages import Logprobs
from specdecode_worker.server.request_sampling import ModelLimits, token_limit, token_limits
from specdecode_worker.server.requests import ChatRequest, CompletionRequest
from specdecode_worker.server.responses import ScoredToken
from specdecode_worker.server.text.bounded_encoding import check_stopped, encode_bounded
from specdecode_worker.server.text.tokenizer import Tokenizer

# Tokens of an echo between two checks whether the client still waits: some milliseconds of work.
_TOKENS_PER_CHECK = 256


@dataclass(frozen=True, slots=True)
class Echo:
    """Text of an echoed prompt.

    ``offsets`` has the character position of each token; empty unless log-probabilities are requested.
    """

    text: str
    offsets: tuple[int, ...] = ()

    def scored(self, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> tuple[ScoredToken, ...]:
        """Return the prompt tokens with their log-probabilities, which the first token does not have.

        Args:
            ids: Token ids of the prompt.
            logprobs: Log-probabilities of all tokens but the first.
        """
        places = zip(ids, self.offsets, (None, *logprobs), strict=True)
        return tuple(ScoredToken(token, offset, logprob) for token, offset, logprob in places)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenized prompt.

    ``echo`` is set only if the client requests it. ``opening`` is the text of the first user turn of a chat, or the
    whole prompt of a completion. ``grammar`` is the grammar that the answer follows; empty for none.
    """

    ids: Sequence[int]
    echo: Echo | None = None
    opening: str = ""
    grammar: str = ""


def completion_prompts(
    tokenizer: Tokenizer, body: CompletionRequest, limits: ModelLimits, stopped: threading.Event
) -> list[Prompt]:
    """Tokenize the prompts of a completion request and check them, before the positions of an echo are computed.

    Run it outside the event loop, because a long prompt takes milliseconds.

    Raises:
        BadRequest: A prompt does not fit the model.
        TextTooLong: A prompt has far more tokens than the context.
        TextWorkStopped: ``stopped`` was set.
    """
    all_ids: list[list[int]] = []
    for given in body.prompt:
        ids = encode_bounded(tokenizer, given, limits.max_model_len, stopped) if isinstance(given, str) else given
        token_limit(body, ids, limits)
        all_ids.append(ids)
    token_limits(body, all_ids, limits)
    return prompts_of_ids(tokenizer, body, all_ids, stopped)


def prompts_of_ids(
    tokenizer: Tokenizer, body: CompletionRequest, all_ids: Sequence[Sequence[int]], stopped: threading.Event
) -> list[Prompt]:
    """Return the prompts of a completion request, of which the token ids are known.

    Raises:
        TextWorkStopped: ``stopped`` was set.
    """
    prompts = []
    for given, ids in zip(body.prompt, all_ids, strict=True):
        echo = _echo(tokenizer, ids, given, body, stopped) if body.echo else None
        prompts.append(Prompt(ids, echo, given if isinstance(given, str) else " ".join(map(str, ids))))
    return prompts


def chat_prompt(
    tokenizer: Tokenizer, text: str, body: ChatRequest, limits: ModelLimits, stopped: threading.Event
) -> Prompt:
    """Tokenize a conversation that is rendered to ``text``.

    Raises:
        TextTooLong: The text has far more tokens than the context.
        TextWorkStopped: ``stopped`` was set.
    """
    said = [message.content for message in body.messages if message.role == "user"] or [text]
    ids = encode_bounded(tokenizer, text, limits.max_model_len, stopped, add_special_tokens=False)
    return Prompt(ids, opening=said[0])


def _echo(
    tokenizer: Tokenizer, ids: Sequence[int], given: str | list[int], body: CompletionRequest, stopped: threading.Event
) -> Echo:
    skip_special = body.skip_special_tokens
    text = given if isinstance(given, str) else tokenizer.decode(ids, skip_special_tokens=skip_special)
    if body.logprobs is None:
        return Echo(text)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip_special)
    offsets, length = [], 0
    for index, token in enumerate(ids):
        if index % _TOKENS_PER_CHECK == 0:
            check_stopped(stopped)
        offsets.append(length)
        length += len(detokenizer.push(token))
    return Echo(text, tuple(offsets))
