"""Tokenizer of one model: text to token ids, and incremental detokenization.

The server and the command ``generate`` use it. A character can span several tokens. The `Detokenizer` returns a
character once it is complete; the concatenation of all returned text is the text of all tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from specdecode_worker.guided.grammar_compiler import TEXT_TAGS
from specdecode_worker.models.errors import TokenizerProblem
from specdecode_worker.models.vocabulary.chat_template import ChatTemplate, Message, find_template
from specdecode_worker.models.vocabulary.token_bytes import Vocabulary
from specdecode_worker.server.text.length_bound import most_bytes_per_token

_INCOMPLETE = "\ufffd"
# The text of the first token depends on the tokens before it (a leading space, an incomplete character); this many
# tokens are enough to decide it.
_CONTEXT_TOKENS = 6
# A character has at most four bytes, so a longer run of incomplete characters is invalid text and is returned as it is.
# A longer run of tokens without text becomes the context of the next tokens, so that the cost per token is bounded.
_MOST_HELD_TOKENS = 32


class Tokenizer:
    """Tokenizer and chat template of one model. Safe to share between threads."""

    def __init__(self, model: tokenizers.Tokenizer, template: ChatTemplate | None, digest: str = "") -> None:
        self._model = model
        self.digest = digest
        """Digest of tokenizer.json and of the chat template."""
        self.template = template
        """Chat template; None for a base model."""
        self.vocabulary = Vocabulary(model)
        self._special = frozenset(one.content for one in model.get_added_tokens_decoder().values() if one.special)

    @classmethod
    def from_folder(cls, folder: Path, template: str | None = None) -> Tokenizer:
        """Load tokenizer.json and the chat template of a model folder, or another ``template`` (a file or its text).

        Raises:
            TokenizerProblem: tokenizer.json is missing, or a file cannot be parsed.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerProblem(f"{path} does not exist; only fast tokenizers (tokenizer.json) are read")
        try:
            model = with_text_tags(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerProblem(f"{path} cannot be read: {error}") from None
        model.no_padding()
        model.no_truncation()
        chat_template = find_template(folder, template)
        return cls(model, chat_template, _digest(path, chat_template))

    @property
    def json(self) -> str:
        """Contents of tokenizer.json, without padding and truncation."""
        return str(self._model.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included."""
        return int(self._model.get_vocab_size(with_added_tokens=True))

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """Largest number of UTF-8 bytes of a text that one token can stand for; None if no bound is known."""
        return most_bytes_per_token(self._model)

    def tokens_from(self, first: int) -> Mapping[int, str]:
        """Return the tokens with ids from ``first`` on, by id."""
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        return {token: piece for piece, token in sorted(vocabulary.items(), key=lambda one: one[1]) if token >= first}

    @property
    def has_chat_template(self) -> bool:
        """True unless the model is a base model without chat template."""
        return self.template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, by default with the special tokens (such as BOS) of the tokenizer."""
        # The batch form releases the interpreter lock, so that a long text does not stop the other threads.
        (encoding,) = self._model.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def chat_template(self) -> ChatTemplate:
        """Return the chat template. Raises TokenizerProblem for a base model."""
        if self.template is None:
            raise TokenizerProblem("this model has no chat template; send a prompt instead of messages")
        return self.template

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt text of a conversation.

        Raises:
            TokenizerProblem: The model has no chat template.
            TemplateRefused: The template does not accept the messages.
        """
        return self.chat_template().render(messages)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's turn. Raises like ``render``."""
        return self.encode_rendered(self.render(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a rendered template. Templates write BOS themselves, so no special token is added."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return str(self._model.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def is_dropped(self, token: int, *, skip_special_tokens: bool) -> bool:
        """Return whether ``decode`` drops a token before it forms the text, as if the token were not there.

        It drops ids without a token, and special tokens if they are skipped.
        """
        piece = self._model.id_to_token(token)
        return piece is None or (skip_special_tokens and piece in self._special)

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for the tokens that follow ``prompt``."""
        return Detokenizer(self, prompt, skip_special_tokens=skip_special_tokens)


def with_text_tags(model: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer in which no TEXT_TAGS are special, so that they reach parsers and clients."""
    if not any(one.special and one.content in TEXT_TAGS for one in model.get_added_tokens_decoder().values()):
        return model
    document = json.loads(model.to_str())
    for one in document["added_tokens"]:
        one["special"] = one["special"] and one["content"] not in TEXT_TAGS
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def _digest(path: Path, template: ChatTemplate | None) -> str:
    parts = path.read_bytes(), b"" if template is None else template.digest_source.encode()
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


class Detokenizer:
    """Incremental detokenizer for the tokens of one choice.

    New text is the text of (context + fresh tokens) without the text of the context. The context ends with a complete
    character, so new text begins with one. Only the context and the fresh tokens are decoded in each call, and both are
    bounded: the cost per token does not grow with the length of the output, whatever its tokens are.
    """

    __slots__ = ("_context", "_context_text", "_fresh", "_skips_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._context = list(prompt[-_CONTEXT_TOKENS:])
        self._context_text = self._decode(self._context)
        self._fresh: list[int] = []

    def push(self, token: int) -> str:
        """Add a token and return the new text; empty while the last character is incomplete."""
        if self._tokenizer.is_dropped(token, skip_special_tokens=self._skips_special):
            return ""
        self._fresh.append(token)
        new = self._new_text()
        if (not new or new.endswith(_INCOMPLETE)) and len(self._fresh) < _MOST_HELD_TOKENS:
            return ""
        self._settle()
        return new

    def flush(self) -> str:
        """Return the remaining text after the last token. An incomplete character becomes U+FFFD."""
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
