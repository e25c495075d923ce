"""The target's tokenizer and chat template for training, which converts whole conversations at once."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from specdecode_worker.models.vocabulary.chat_template import find_template
from specdecode_worker.training.errors import TrainingError


class Chat:
    """Tokenizer and chat template of a target.

    Raises:
        TrainingError: The folder has no chat template.
        TokenizerProblem: The chat template cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = find_template(folder)
        if template is None:
            raise TrainingError(f"{folder} has no chat template; training needs a chat model")
        self._template = template

    def render(self, messages: list[dict[str, str]], *, answer: bool = True) -> str:
        """Return the conversation as text, with ``answer`` up to where the assistant's answer starts."""
        return self._template.render(messages, add_generation_prompt=answer)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without adding special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ask(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's answer starts."""
        return self.encode(self.render(messages))

    def around_question(self) -> tuple[list[int], list[int]]:
        """Return the ids before a user's question and the ids between it and its answer.

        They frame questions that are generated token by token.
        """
        mark = "QUESTION"
        before, after = self.render([{"role": "user", "content": mark}]).split(mark)
        return self.encode(before), self.encode(after)
