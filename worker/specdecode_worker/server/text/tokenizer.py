"""Text to token ids and back, for one model. ``generate`` uses it as the server does.

Answers come back token by token, while characters may span tokens: the Detokenizer shows a character once it is
whole, and the concatenation of what it shows is the text of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from specdecode_worker.server.errors import TokenizerProblem
from specdecode_worker.server.text.chat_template import ChatTemplate, Message, find_template
from specdecode_worker.server.text.token_bytes import Vocabulary

_INCOMPLETE = "\ufffd"
# The first token's text depends on what stands before it (a leading space, half a character); this much decides it.
_CONTEXT_TOKENS = 6
# A character has at most four bytes, so a longer run of incomplete ones is garbage and is shown as it is.
_MOST_HELD_TOKENS = 32


class Tokenizer:
    """The tokenizer and chat template of one model. Safe to share between threads."""

    def __init__(self, model: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._model = model
        self.template = template
        """None for a base model."""
        self.vocabulary = Vocabulary(model)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and the chat template. Raises TokenizerProblem."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerProblem(f"{path} does not exist; only fast tokenizers (tokenizer.json) are read")
        try:
            model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerProblem(f"{path} cannot be read: {error}") from None
        model.no_padding()
        model.no_truncation()
        return cls(model, find_template(folder))

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of plain text, with the special tokens (BOS) that this tokenizer puts around a text."""
        return list(self._model.encode(text, add_special_tokens=add_special_tokens).ids)

    def chat_template(self) -> ChatTemplate:
        """Raises TokenizerProblem for a base model."""
        if self.template is None:
            raise TokenizerProblem("this model has no chat template; send a prompt instead of messages")
        return self.template

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text of a chat. Raises TokenizerProblem without a template, TemplateRefused."""
        return self.chat_template().render(messages)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat, up to where the answer begins. Raises as ``render`` does."""
        return self.encode_rendered(self.render(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of what a template gave, which writes BOS itself."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return str(self._model.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """For the answer to ``prompt``."""
        return Detokenizer(self, prompt, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Text of an answer, as its tokens come.

    What is new is the text of (context + fresh tokens) minus the text of the context; the context ends with a whole
    character, so the difference begins with one. Few tokens are decoded at a time, however long the answer.
    """

    __slots__ = ("_context", "_context_text", "_fresh", "_skips_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._context = list(prompt[-_CONTEXT_TOKENS:])
        self._context_text = self._decode(self._context)
        self._fresh: list[int] = []

    def push(self, token: int) -> str:
        """The new text, empty while a character is incomplete."""
        self._fresh.append(token)
        new = self._new_text()
        if not new or (new.endswith(_INCOMPLETE) and len(self._fresh) < _MOST_HELD_TOKENS):
            return ""
        self._settle()
        return new

    def flush(self) -> str:
        """What is left when no more tokens come; half a character shows as U+FFFD."""
        new = self._new_text()
        self._settle()
        return new

    def _new_text(self) -> str:
        return self._decode(self._context + self._fresh)[len(self._context_text) :]

    def _settle(self) -> None:
        if self._fresh:
            self._context, self._fresh = self._fresh, []
            self._context_text = self._decode(self._context)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)
