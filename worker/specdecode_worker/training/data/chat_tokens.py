"""Text to token ids and back for training: the target's own tokenizer and chat template.

The server has its own, incremental one; here whole conversations are turned at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from specdecode_worker.training.errors import TrainingError


class Chat:
    """Renders conversations as the target was taught to read them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
        template = self._settings.get("chat_template")
        if not isinstance(template, str):
            raise TrainingError(f"{folder}/tokenizer_config.json has no chat_template; training needs a chat model")
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)

    def render(self, messages: list[dict[str, str]], *, answer: bool = True) -> str:
        """The conversation as text, up to where the assistant's answer starts."""
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in self._settings.items()
            if name.endswith("_token") and token is not None
        }
        return self._template.render(messages=messages, add_generation_prompt=answer, **special)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ask(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation that waits for its answer."""
        return self.encode(self.render(messages))

    def around_question(self) -> tuple[list[int], list[int]]:
        """(ids before a user's question, ids between it and its answer), for questions made token by token."""
        mark = "QUESTION"
        before, after = self.render([{"role": "user", "content": mark}]).split(mark)
        return self.encode(before), self.encode(after)
