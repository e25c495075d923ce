"""Sources of the target's questions: prompt files, the combinatorial set, and questions that the target generates.

Training never uses a held-out prompt: a combinatorial prompt (``prompts``) or a generated question that shares a run of
words with one is dropped here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from specdecode_worker.training.data import prompts
from specdecode_worker.training.data.chat_tokens import Chat
from specdecode_worker.training.errors import PromptFileError

# Temperatures of the answers and their shares: most requests are greedy, the other temperatures add variety.
TEMPERATURES = ((0.0, 0.4), (0.6, 0.2), (0.8, 0.25), (1.0, 0.15))
SELF_ASKED = 0.3  # share of conversations with a question that the target generates itself
LONGEST_PROMPT = 224  # tokens; longer training prompts are dropped


@dataclass(frozen=True, slots=True)
class Question:
    """Question to answer, with the temperature of its answer.

    ``ids`` is the conversation up to the answer, or None if the target generates the question.
    """

    ids: tuple[int, ...] | None
    temperature: float
    domain: str


class Message(BaseModel):
    """Chat message of a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str


class PromptLine(BaseModel):
    """Line of a file of prompts: chat messages or a plain prompt, and its domain."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    domain: str = "other"

    @model_validator(mode="after")
    def _one_of_two(self) -> PromptLine:
        if bool(self.messages) == (self.prompt is not None):
            raise ValueError('give either "messages" or "prompt"')
        return self

    @property
    def text(self) -> str:
        """Text of the prompt or of all its messages."""
        return self.prompt if self.prompt is not None else "\n".join(message.content for message in self.messages)

    def ids(self, chat: Chat) -> tuple[int, ...]:
        """Return the token ids to continue: a plain prompt unchanged, messages through the chat template."""
        if self.prompt is not None:
            return tuple(chat.encode(self.prompt))
        return tuple(chat.ask([message.model_dump() for message in self.messages]))


def read_prompts(path: Path) -> list[PromptLine]:
    """Return the lines of a file of prompts (JSON lines).

    Raises:
        PromptFileError: The file cannot be read, has no prompts or has an invalid line, which the message names.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read: {error.strerror}") from None
    prompt_lines = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt_lines.append(PromptLine.model_validate(json.loads(line)))
        except (ValueError, ValidationError) as error:
            raise PromptFileError(f"{path}, line {number}: {error}") from None
    if not prompt_lines:
        raise PromptFileError(f'{path} holds no prompts; write lines of {{"messages": [...]}} or {{"prompt": "..."}}')
    return prompt_lines


def greedy(lines: Sequence[PromptLine], chat: Chat) -> Iterator[Question]:
    """Yield each prompt of a file once, at temperature 0."""
    for line in lines:
        yield Question(line.ids(chat), 0.0, line.domain)


class TrainingQuestions:
    """Endless training questions: from ``own`` if given, else from the combinatorial set and the target itself."""

    def __init__(self, chat: Chat, held_out: Sequence[PromptLine], seed: int, own: Sequence[PromptLine] = ()) -> None:
        self._chat, self._own, self._rng = chat, own, random.Random(seed)
        self._held_out = [prompts.ngrams(line.text) for line in held_out]

    def __iter__(self) -> Iterator[Question]:
        while True:
            temperature = self._rng.choices([t for t, _ in TEMPERATURES], [share for _, share in TEMPERATURES])[0]
            if not self._own and self._rng.random() < SELF_ASKED:
                yield Question(None, temperature, prompts.SELF_ASKED)
            elif (ids := self._draw_prompt()) is not None:
                yield Question(ids[0], temperature, ids[1])

    def _draw_prompt(self) -> tuple[tuple[int, ...], str] | None:
        """Return the token ids and domain of a random prompt, or None if it is too long or held out."""
        if self._own:
            line = self._rng.choice(self._own)
        else:
            made = prompts.draw(self._rng)
            line = PromptLine(messages=(Message(role="user", content=made.text),), domain=made.domain)
        ids = line.ids(self._chat)
        wanted = len(ids) <= LONGEST_PROMPT and not prompts.overlaps(line.text, self._held_out)
        return (ids, line.domain) if wanted else None

    def is_refused(self, question: list[int]) -> bool:
        """Return whether a question that the target generated is shorter than three words or held out."""
        text = self._chat.tokenizer.decode(question)
        return len(text.split()) < 3 or prompts.overlaps(text, self._held_out)
