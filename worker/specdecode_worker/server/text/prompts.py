"""Prompts ready for the engine, and what of them goes back with ``echo``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.engine.ipc.messages import Logprobs
from specdecode_worker.server.requests import ChatRequest, CompletionRequest
from specdecode_worker.server.responses import Scored
from specdecode_worker.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text; ``offsets`` are its tokens' places in it, known where log-probabilities are wanted."""

    text: str
    offsets: tuple[int, ...] = ()

    def scored(self, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> tuple[Scored, ...]:
        """The tokens with what the engine says of the second and all behind it."""
        places = zip(ids, self.offsets, (None, *logprobs), strict=True)
        return tuple(Scored(token, offset, found) for token, offset, found in places)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids; ``echo`` only where the client wants the prompt back. ``opening`` is what the user said first."""

    ids: Sequence[int]
    echo: Echo | None = None
    opening: str = ""


def completion_prompts(tokenizer: Tokenizer, body: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion. Takes milliseconds for a long one: not for the event loop."""
    prompts = []
    for given in body.prompt:
        ids = tokenizer.encode(given) if isinstance(given, str) else given
        wants_offsets = body.logprobs is not None
        echo = _echo(tokenizer, ids, given, body.skip_special_tokens, wants_offsets) if body.echo else None
        prompts.append(Prompt(ids, echo, given if isinstance(given, str) else " ".join(map(str, ids))))
    return prompts


def chat_prompt(tokenizer: Tokenizer, body: ChatRequest) -> Prompt:
    """The prompt of a chat, rendered by the model's template. Raises TokenizerProblem, TemplateRefused."""
    messages = [message.rendered() for message in body.messages]
    text = tokenizer.chat_template().render(messages, body.shown_tools, body.chat_template_kwargs)
    said = [message.content for message in body.messages if message.role == "user"] or [text]
    return Prompt(tokenizer.encode_rendered(text), opening=said[0])


def _echo(
    tokenizer: Tokenizer, ids: Sequence[int], given: str | list[int], skip_special: bool, wants_offsets: bool
) -> Echo:
    text = given if isinstance(given, str) else tokenizer.decode(ids, skip_special_tokens=skip_special)
    if not wants_offsets:
        return Echo(text)
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip_special)
    offsets, length = [], 0
    for token in ids:
        offsets.append(length)
        length += len(detokenizer.push(token))
    return Echo(text, tuple(offsets))
