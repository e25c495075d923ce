"""The tokenizer of the served model, and stop strings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from specdecode_worker.guided.grammars import TEXT_TAGS
from specdecode_worker.models.chat_template import ChatTemplate, Message, find_template
from specdecode_worker.models.errors import TokenizerProblem
from specdecode_worker.models.vocabulary import Vocabulary, open_tokenizer

# Tokenizer of one model: text to token ids, and incremental detokenization.
#
# The server and the command ``generate`` use it. A character can span several tokens. The `Detokenizer` returns a
# character once it is complete; the concatenation of all returned text is the text of all tokens.

_INCOMPLETE = "\ufffd"
# The text of the first token depends on the tokens before it (a leading space, an incomplete character); this many
# tokens are enough to decide it.
_CONTEXT_TOKENS = 6
# A character has at most four bytes, so a longer run of incomplete characters is invalid text and is returned as it is.
# A longer run of tokens without text becomes the context of the next tokens, so that the cost per token is bounded.
_MOST_HELD_TOKENS = 32
_CONTINUATION = range(0x80, 0xC0)
"""Bytes of UTF-8 that continue a character."""
_MOST_BYTES = 4
"""Most bytes of a character in UTF-8."""


class Tokenizer:
    """Tokenizer and chat template of one model. Safe to share between threads."""

    def __init__(self, model: tokenizers.Tokenizer, template: ChatTemplate | None, digest: str = "") -> None:
        self._model = model
        self.digest = digest
        """Digest of the tokenizer and of the chat template."""
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
            model = with_text_tags(open_tokenizer(folder))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerProblem(f"{path} cannot be read: {error}") from None
        chat_template = find_template(folder, template)
        return cls(model, chat_template, _digest(path, model, chat_template))

    @property
    def json(self) -> str:
        """Contents of tokenizer.json without padding and truncation, and with the tokens that `open_tokenizer` adds."""
        return str(self._model.to_str())

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included."""
        return int(self._model.get_vocab_size(with_added_tokens=True))

    def tokens_from(self, first: int) -> Mapping[int, str]:
        """Return the tokens with ids from ``first`` on, by id."""
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        return {token: piece for piece, token in sorted(vocabulary.items(), key=lambda one: one[1]) if token >= first}

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

    def decode_complete(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids without the character that is incomplete at their end, if there is one."""
        count = self.incomplete_end(ids, skip_special_tokens=skip_special_tokens)
        if count and self.vocabulary.is_byte(ids[-count]):
            # A run of bytes is decoded as a whole, so those of an incomplete character would spoil the others.
            return self.decode(ids[:-count], skip_special_tokens=skip_special_tokens)
        text = self.decode(ids, skip_special_tokens=skip_special_tokens)
        return text[:-1] if count else text

    def incomplete_end(self, ids: Sequence[int], *, skip_special_tokens: bool) -> int:
        """Return the number of tokens from the one on in which an incomplete character at the end begins; 0 without."""
        ending = b""
        for count, token in enumerate(reversed(ids[-_MOST_HELD_TOKENS:]), start=1):
            if not self.is_dropped(token, skip_special_tokens=skip_special_tokens):
                ending = self.vocabulary.bytes_of(token) + ending
                begin = next((i for i in range(1, len(ending) + 1) if ending[-i] not in _CONTINUATION), None)
                if begin is not None:
                    return count if begin < _character_bytes(ending[-begin]) else 0
                if len(ending) >= _MOST_BYTES:
                    break
        return 0

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


def _digest(path: Path, model: tokenizers.Tokenizer, template: ChatTemplate | None) -> str:
    added = repr(sorted(model.get_added_tokens_decoder().items())).encode()
    parts = path.read_bytes(), added, b"" if template is None else template.digest_source.encode()
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _character_bytes(first: int) -> int:
    """Return the number of bytes of the character of UTF-8 that begins with a byte."""
    return 1 + (first >= 0xC2) + (first >= 0xE0) + (first >= 0xF0) if first <= 0xF4 else 1


class Detokenizer:
    """Incremental detokenizer for the tokens of one choice.

    New text is the text of (context + fresh tokens) without the text of the context. The context ends with a complete
    character, so new text begins with one. A character that is incomplete at the end of the prompt is part of the new
    text. Only the context and the fresh tokens are decoded in each call, and both are bounded: the cost per token does
    not grow with the length of the output, whatever its tokens are.
    """

    __slots__ = ("_context", "_context_text", "_fresh", "_of_prompt", "_skips_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        vocabulary, start = tokenizer.vocabulary, max(0, len(prompt) - _CONTEXT_TOKENS)
        # A run of bytes is decoded as a whole, so it must begin with a character.
        for _ in range(min(start, _MOST_BYTES - 1)):
            if vocabulary.is_byte(prompt[start]) and vocabulary.bytes_of(prompt[start])[0] in _CONTINUATION:
                start -= 1
        ids = list(prompt[start:])
        count = tokenizer.incomplete_end(ids, skip_special_tokens=skip_special_tokens)
        self._context, self._fresh = ids[: len(ids) - count], ids[len(ids) - count :]
        if count and vocabulary.is_byte(self._fresh[0]):
            self._context, self._context_text = [], ""
        else:
            self._context_text = tokenizer.decode_complete(ids, skip_special_tokens=skip_special_tokens)
        self._of_prompt = count
        """Number of the fresh tokens that are of the prompt; they have no text without a token behind them."""

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
        new = self._new_text() if len(self._fresh) > self._of_prompt else ""
        self._settle()
        return new

    def _new_text(self) -> str:
        return self._decode(self._context + self._fresh)[len(self._context_text) :]

    def _settle(self) -> None:
        if self._fresh:
            self._context, self._fresh, self._of_prompt = self._fresh, [], 0
            self._context_text = self._decode(self._context)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)


# Search for stop strings in streamed text; text that may be the start of a stop string is held back.


class StopFinder:
    """Filter that ends a stream of text at the first stop string.

    Each ``push`` returns the text that may be sent to the client; after a stop string, it returns no more text. With
    ``shows_stop`` the stop string itself is returned too.
    """

    __slots__ = ("_held", "_shows_stop", "_stops", "_too_early", "matched")

    def __init__(self, stops: tuple[str, ...], *, shows_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = stops
        self._shows_stop = shows_stop
        self._held = ""
        self._too_early = 0
        """Characters of the held text, from its beginning, at which no stop string may end."""
        self.matched: str | None = None
        """Stop string that ended the text; None before that."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add ``text`` and return the held text that cannot be part of a stop string.

        Without ``may_end`` a stop string that ends in ``text`` is ignored; one may begin there.
        """
        if self.matched is not None:
            return ""
        self._held += text
        if not may_end:
            self._too_early = len(self._held)
        places = ((self._held.find(stop, max(0, self._too_early - len(stop) + 1)), stop) for stop in self._stops)
        first = min(((at, stop) for at, stop in places if at >= 0), default=None)
        if first is not None:
            at, self.matched = first
            return self._release(at + (len(self.matched) if self._shows_stop else 0), drop_rest=True)
        return self._release(len(self._held) - self._possible_begin())

    def flush(self) -> str:
        """Return the text held back. Call it at the end of the stream."""
        return self._release(len(self._held))

    def _possible_begin(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        """Remove and return the first ``length`` characters of the held text."""
        shown, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        self._too_early = max(0, self._too_early - length)
        return shown
