"""Tokenized prompts of completion and chat requests, with the text to echo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.engine.ipc.messages import Logprobs
from specdecode_worker.server.requests import ChatRequest, CompletionRequest
from specdecode_worker.server.responses import ScoredToken
from specdecode_worker.server.text.tokenizer import Tokenizer


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
    whole prompt of a completion.
    """

    ids: Sequence[int]
    echo: Echo | None = None
    opening: str = ""


def completion_prompts(tokenizer: Tokenizer, body: CompletionRequest) -> list[Prompt]:
    """Tokenize the prompts of a completion request.

    Run it outside the event loop, because a long prompt takes milliseconds.
    """
    prompts = []
    for given in body.prompt:
        ids = tokenizer.encode(given) if isinstance(given, str) else given
        wants_offsets = body.logprobs is not None
        echo = _echo(tokenizer, ids, given, body.skip_special_tokens, wants_offsets) if body.echo else None
        prompts.append(Prompt(ids, echo, given if isinstance(given, str) else " ".join(map(str, ids))))
    return prompts


def chat_prompt(tokenizer: Tokenizer, body: ChatRequest) -> Prompt:
    """Render a conversation with the chat template of the model and tokenize it.

    Raises:
        TokenizerProblem: The model has no chat template.
        TemplateRefused: The template does not accept the messages.
    """
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
