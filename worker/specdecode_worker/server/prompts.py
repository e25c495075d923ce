"""Prompts of requests: rendered, encoded, checked for length, and with their grammars."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from specdecode_worker.core.messages import Logprobs
from specdecode_worker.models.errors import TemplateRefused, TokenizerProblem
from specdecode_worker.server.admission import ModelLimits, token_limit, token_limits, truncated
from specdecode_worker.server.chat_template import (
    TOKENS_FACTOR,
    Lane,
    TemplatePool,
    TextThreads,
    TextTooLong,
    TextWorkStopped,
    check_stopped,
    encode_bounded,
    lane_of,
)
from specdecode_worker.server.errors import BadRequest, TooManyWaiting, Unavailable
from specdecode_worker.server.grammars import AnswerGrammars
from specdecode_worker.server.requests import (
    ChatRequest,
    CompletionRequest,
    ConversationRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from specdecode_worker.server.responses import ScoredToken
from specdecode_worker.server.tokenizer import Tokenizer

# Tokenized prompts of completion and chat requests, with the text to echo.

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
    special, context = body.add_special_tokens, limits.max_model_len
    for given in body.prompt:
        if isinstance(given, str):
            ids = encode_bounded(tokenizer, given, context, stopped, add_special_tokens=special)
        else:
            ids = given
        ids = truncated(body, ids, limits)
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
        shown = given if body.truncate_prompt_tokens is None else list(ids)
        echo = _echo(tokenizer, ids, shown, body, stopped) if body.echo else None
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
    said = [message.text for message in body.messages if message.role == "user"] or [text]
    special = body.add_special_tokens
    ids = encode_bounded(tokenizer, text, limits.max_model_len, stopped, add_special_tokens=special)
    return Prompt(truncated(body, ids, limits), opening=said[0])


def _echo(
    tokenizer: Tokenizer, ids: Sequence[int], given: str | list[int], body: CompletionRequest, stopped: threading.Event
) -> Echo:
    """Return the echo of a prompt: a text as it was given, or the text of token ids.

    With log-probabilities the echo is the text of the tokens, in which their offsets are. Special tokens that the given
    text has are part of it; those that the tokenizer added are not.
    """
    if isinstance(given, str) and body.logprobs is None:
        return Echo(given)
    shown, before, skip_special = ids, 0, body.skip_special_tokens
    if isinstance(given, str) and any(tokenizer.is_dropped(token, skip_special_tokens=True) for token in ids):
        shown, skip_special = tokenizer.encode(given, add_special_tokens=False), False
        starts = range(len(ids) - len(shown) + 1)
        before = next((at for at in starts if list(ids[at : at + len(shown)]) == shown), 0)
    # The output completes a character that is incomplete at the end of the prompt.
    decode = tokenizer.decode if body.max_tokens == 0 else tokenizer.decode_complete
    text = decode(shown, skip_special_tokens=skip_special)
    if body.logprobs is None:
        return Echo(text)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip_special)
    offsets, length = [0] * before, 0
    for index, token in enumerate(shown):
        if index % _TOKENS_PER_CHECK == 0:
            check_stopped(stopped)
        offsets.append(length)
        length += len(detokenizer.push(token))
    return Echo(text, (*offsets[: len(ids)], *[len(text)] * (len(ids) - len(offsets))))


# Work on the texts of requests outside the event loop: rendering, tokenization, echoes and detokenization.

Replayed = TypeVar("Replayed")

# Characters of all texts that wait for a thread or are worked on, of up to four bytes each.
_MAX_WAITING_CHARACTERS = 32 * 1024 * 1024


class PromptPreparation:
    """Preparation of the prompts of one model. A cancelled call stops its work.

    Answers to prompts can follow a grammar, which is compiled here too, so that the engine can use it.

    All methods raise BadRequest for a request that can never be served, TooManyWaiting if too much text waits for a
    thread, and Unavailable after ``close``.
    """

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, grammars: AnswerGrammars) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = TextThreads()
        self._characters = 0
        self._templates = None if tokenizer.template is None else TemplatePool(tokenizer.template)

    def start(self) -> None:
        """Start a process for the chat template, so that the first client does not wait for it."""
        if self._templates is not None:
            self._templates.start()

    def close(self) -> None:
        """End threads and processes. Work under way ends at its next check."""
        self._threads.close()
        self._grammars.close()
        if self._templates is not None:
            self._templates.close()

    async def prompts(self, body: CompletionRequest | ChatRequest) -> list[Prompt]:
        """Return the tokenized and checked prompts of a request, a conversation rendered, with their grammar."""
        prompts = [await self._chat(body)] if isinstance(body, ChatRequest) else await self._completion(body)
        grammar = await self._grammars.of(body)
        return [replace(prompt, grammar=grammar) for prompt in prompts]

    async def _completion(self, body: CompletionRequest) -> list[Prompt]:
        characters = sum(map(len, body.prompt))
        work = partial(completion_prompts, self._tokenizer, body, self._limits)
        with self._errors("prompt"), self._counted(characters):
            return await self._threads.run(lane_of(characters), work)

    async def resumed(self, body: GenerationRequest, prompts: Sequence[Sequence[int]]) -> list[Prompt]:
        """Return the prompts of a request from their token ids, without rendering or tokenizing a text."""
        if not isinstance(body, CompletionRequest):
            return [Prompt(ids) for ids in prompts]
        work = partial(prompts_of_ids, self._tokenizer, body, prompts)
        with self._errors("prompt"):
            return await self._threads.run(lane_of(sum(map(len, prompts)) if body.echo else 0), work)

    async def replay(self, tokens: int, work: Callable[[], Replayed]) -> Replayed:
        """Return the result of ``work``, which detokenizes so many tokens of an earlier attempt."""
        with self._errors("resume"):
            return await self._threads.run(lane_of(tokens), lambda _stopped: work())

    async def _chat(self, body: ChatRequest) -> Prompt:
        with self._errors("messages"), self._counted(len(body.text)):
            text = await self._rendered(body)
            work = partial(chat_prompt, self._tokenizer, text, body, self._limits)
            return await self._threads.run(lane_of(len(text)), work)

    async def tokenize(self, body: TokenizeRequest | TokenizeChatRequest) -> list[int]:
        """Return the token ids of a text or of a conversation."""
        field, given = ("prompt", body.prompt) if isinstance(body, TokenizeRequest) else ("messages", body.text)
        with self._errors(field), self._counted(len(given)):
            text = given if isinstance(body, TokenizeRequest) else await self._rendered(body)
            special, longest = body.add_special_tokens, self._limits.max_model_len
            return await self._threads.run(
                lane_of(len(text)),
                lambda stopped: encode_bounded(self._tokenizer, text, longest, stopped, add_special_tokens=special),
            )

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        most = TOKENS_FACTOR * self._limits.max_model_len
        if len(ids) > most:
            raise BadRequest(f"a request may have at most {most} tokens, got {len(ids)}", param="tokens")
        if any(token >= self._tokenizer.vocab_size for token in ids):
            raise BadRequest(f"token ids must lie in 0..{self._tokenizer.vocab_size - 1}", param="tokens")
        with self._errors("tokens"):
            return await self._threads.run(
                lane_of(len(ids)), lambda _stopped: self._tokenizer.decode(ids, skip_special_tokens=False)
            )

    async def _rendered(self, body: ConversationRequest) -> str:
        templates = self._templates
        if templates is None:
            self._tokenizer.chat_template()  # raises TokenizerProblem
            raise AssertionError("a model without template pool has no template")
        messages = [message.rendered() for message in body.messages]
        return await self._threads.run(
            Lane.TEMPLATE,
            lambda _stopped: templates.render(
                messages,
                body.shown_tools,
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            ),
        )

    @contextlib.contextmanager
    def _counted(self, characters: int) -> Iterator[None]:
        """Count a text while it waits for its work or is worked on.

        Raises:
            TooManyWaiting: The text would be one too many.
        """
        if self._characters and self._characters + characters > _MAX_WAITING_CHARACTERS:
            raise TooManyWaiting("too many long texts are waiting to be tokenized; try again later")
        self._characters += characters
        try:
            yield
        finally:
            self._characters -= characters

    @contextlib.contextmanager
    def _errors(self, field: str) -> Iterator[None]:
        """Translate the errors of work on texts into responses that name ``field``."""
        try:
            yield
        except TextTooLong:
            raise BadRequest(
                f"this model's maximum context length is {self._limits.max_model_len} tokens, and the text has more. "
                "Shorten it",
                param=field,
                code="context_length_exceeded",
            ) from None
        except (TemplateRefused, TokenizerProblem) as error:
            raise BadRequest(str(error), param=field, code="invalid_value") from None
        except TextWorkStopped:
            raise Unavailable("this worker is shutting down", code="draining") from None
