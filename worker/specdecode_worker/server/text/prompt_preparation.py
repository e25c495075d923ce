"""Work on the texts of requests outside the event loop: rendering, tokenization, echoes and detokenization."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from specdecode_worker.models.errors import TemplateRefused, TokenizerProblem
from specdecode_worker.models.vocabulary.chat_template import Message
from specdecode_worker.server.errors import BadRequest, TooManyWaiting, Unavailable
from specdecode_worker.server.grammars.answer_grammars import AnswerGrammars
from specdecode_worker.server.request_sampling import ModelLimits
from specdecode_worker.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from specdecode_worker.server.text.bounded_encoding import (
    TOKENS_FACTOR,
    TextTooLong,
    TextWorkStopped,
    check_length,
    encode_bounded,
)
from specdecode_worker.server.text.prompts import Prompt, chat_prompt, completion_prompts, prompts_of_ids
from specdecode_worker.server.text.template_pool import TemplatePool
from specdecode_worker.server.text.text_threads import Lane, TextThreads, lane_of
from specdecode_worker.server.text.tokenizer import Tokenizer

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

    async def completion(self, body: CompletionRequest) -> list[Prompt]:
        """Tokenize and check the prompts of a completion request."""
        characters = sum(map(len, body.prompt))
        work = partial(completion_prompts, self._tokenizer, body, self._limits)
        with self._errors("prompt"):
            for text in body.prompt:
                if isinstance(text, str):
                    check_length(self._tokenizer, text, self._limits.max_model_len)
            with self._counted(characters):
                prompts = await self._threads.run(lane_of(characters), work)
        grammar = await self._grammars.of(body)
        return [replace(prompt, grammar=grammar) for prompt in prompts]

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

    async def chat(self, body: ChatRequest) -> Prompt:
        """Render and tokenize the conversation of a chat request."""
        messages = [message.rendered() for message in body.messages]
        characters = sum(len(message.content) for message in body.messages)
        with self._errors("messages"), self._counted(characters):
            text = await self._rendered(messages, body.shown_tools, body.chat_template_kwargs)
            work = partial(chat_prompt, self._tokenizer, text, body, self._limits)
            prompt = await self._threads.run(lane_of(len(text)), work)
        return replace(prompt, grammar=await self._grammars.of(body))

    async def tokenize(self, body: TokenizeRequest | TokenizeChatRequest) -> list[int]:
        """Return the token ids of a text or of a conversation."""
        if isinstance(body, TokenizeRequest):
            field, characters = "prompt", len(body.prompt)
        else:
            field, characters = "messages", sum(len(message.content) for message in body.messages)
        with self._errors(field), self._counted(characters):
            text = body.prompt if isinstance(body, TokenizeRequest) else await self._conversation(body)
            special = body.add_special_tokens
            return await self._threads.run(
                lane_of(len(text)),
                lambda stopped: encode_bounded(
                    self._tokenizer, text, self._limits.max_model_len, stopped, add_special_tokens=special
                ),
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

    async def _conversation(self, body: TokenizeChatRequest) -> str:
        messages = [message.rendered() for message in body.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        return await self._rendered(
            messages, tools, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt
        )

    async def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        templates = self._templates
        if templates is None:
            self._tokenizer.chat_template()  # raises TokenizerProblem
            raise AssertionError("a model without template pool has no template")
        return await self._threads.run(
            Lane.TEMPLATE,
            lambda _stopped: templates.render(messages, tools, variables, add_generation_prompt=add_generation_prompt),
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
