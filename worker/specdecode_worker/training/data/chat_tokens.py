"""The target's tokenizer and chat template for training.

The server has an incremental implementation of its own. This one converts whole conversations at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from specdecode_worker.training.errors import TrainingError


class Chat:
    """Tokenizer and chat template of a target.

    Raises:
        TrainingError: The tokenizer configuration has no chat template.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
        template = self._settings.get("chat_template")
        if not isinstance(template, str):
            raise TrainingError(f"{folder}/tokenizer_config.json has no chat_template; training needs a chat model")
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)

    def render(self, messages: list[dict[str, str]], *, answer: bool = True) -> str:
        """Return the conversation as text, with ``answer`` up to where the assistant's answer starts."""
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in self._settings.items()
            if name.endswith("_token") and token is not None
        }
        return self._template.render(messages=messages, add_generation_prompt=answer, **special)

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
