"""Tokens and text: the tokenizer of the model, and the tool calls and thinking that an answer's text holds."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import tokenizers

from specdecode_worker.contract import ReasoningFormat, ToolFormat
from specdecode_worker.guided.grammars import TEXT_TAGS
from specdecode_worker.models.chat_template import ChatTemplate, Message, find_template
from specdecode_worker.models.errors import TokenizerProblem
from specdecode_worker.models.vocabulary import open_tokenizer

# Bytes of single tokens, for log-probabilities.
#
# A token can be an incomplete UTF-8 character without text.
#
# Vocabularies write bytes in two ways. Byte-level BPE maps each of the 256 bytes to a printable character (GPT-2's
# ``bytes_to_unicode``). SentencePiece writes text with ``▁`` for a space, and bytes that are no text as ``<0x0A>``.

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Vocabulary:
    """Vocabulary of one tokenizer: the bytes and the written form of each token id."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model
        self._added: Mapping[int, str] = {i: token.content for i, token in model.get_added_tokens_decoder().items()}
        self._letters = _byte_letters() if "ByteLevel(" in repr(model.decoder) else None

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; empty for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._model.id_to_token(token) or ""
        if self._letters is not None:
            return bytes(self._letters[letter] for letter in piece if letter in self._letters)
        if (byte_match := _FALLBACK.fullmatch(piece)) is not None:
            return bytes.fromhex(byte_match[1])
        return piece.replace(_SPACE, " ").encode()

    def is_byte(self, token: int) -> bool:
        """Return whether the token is a byte that SentencePiece writes as ``<0x0A>``."""
        return self._letters is None and _FALLBACK.fullmatch(self.piece_of(token)) is not None

    def piece_of(self, token: int) -> str:
        """Return the token as the vocabulary writes it; empty for an id without a token."""
        return self._model.id_to_token(token) or ""


def _byte_letters() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE.

    Printable bytes map to themselves; the others map to the characters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


# Tokenizer of one model: text to token ids, and incremental detokenization.
#
# The server and the commands with an engine use it. A character can span several tokens. The `Detokenizer` returns a
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

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. The library looks each added token up to count them."""
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

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's turn.

        Raises:
            TokenizerProblem: This is a base model.
            TemplateRefused: The template does not accept the messages.
        """
        # Templates write BOS themselves, so no special token is added.
        return self.encode(self.chat_template().render(messages), add_special_tokens=False)

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


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest beginning of ``word``, but not all of it, with which ``text`` ends."""
    at = max(0, len(text) - len(word) + 1)
    while not word.startswith(text[at:]):
        at += 1
    return len(text) - at


class StopFinder:
    """Filter that ends a stream of text at the first stop string.

    Each ``push`` returns the text that may be sent to the client; after a stop string, it returns no more text. With
    ``shows_stop`` the stop string itself is returned too.
    """

    __slots__ = ("_begun", "_held", "_shows_stop", "matched")

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._begun = dict.fromkeys(stops, 0)
        """Length of the beginning of each stop string with which the text so far ends."""
        self._shows_stop = shows_stop
        self._held = ""
        self.matched: str | None = None
        """Stop string that ended the text; None before that."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add ``text`` and return the held text that cannot be part of a stop string.

        Without ``may_end`` a stop string that ends in ``text`` is ignored; one may begin there.
        """
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._begun if (at := self._search(stop, text)) >= 0]
        if found and may_end:
            at, self.matched = min(found)
            return self._release(at + (len(self.matched) if self._shows_stop else 0), drop_rest=True)
        return self._release(len(self._held) - max(self._begun.values(), default=0))

    def flush(self) -> str:
        """Return the text held back. Call it at the end of the stream."""
        return self._release(len(self._held))

    def _search(self, stop: str, text: str) -> int:
        """Return where in the held text a stop string begins that ends in ``text``, its new part; -1 for none."""
        searched = stop[: self._begun[stop]] + text
        self._begun[stop] = _overlap(searched, stop)
        at = searched.find(stop)
        return at if at < 0 else len(self._held) - len(searched) + at

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        """Remove and return the first ``length`` characters of the held text."""
        shown, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        return shown


# Streaming parsers of tool calls in generated text, one for each format in which models write them.

# Output types and interface of the tool call parsers.


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """Tool call of the model. ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


Delta = str | WrittenCall
"""Text of the message, or a call."""
IsOffered = Callable[[str], bool]
"""Predicate: the request offers a function of this name."""


class ToolParser(Protocol):
    """Streaming parser of one choice. Its concatenated output does not depend on how the text was split into pieces."""

    def push(self, text: str) -> list[Delta]:
        """Add text and return the output that is certain."""
        ...

    def end(self) -> list[Delta]:
        """Return the output held back. Call it at the end of the text."""
        ...


def text_deltas(text: str) -> list[Delta]:
    """Return ``text`` as content; no delta if it is empty."""
    return [text] if text else []


# Parser of one tool call that is a JSON object: {"name": ..., "arguments": {...}}.
#
# A call has a name that clients can send back, and arguments that are a JSON object; any other text is no call. It is
# therefore returned once it is complete. Llama models write ``parameters`` instead of ``arguments``.

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
"""Names of functions, as OpenAI defines them, and with dots."""
_ARGUMENTS = frozenset(("arguments", "parameters"))
_KEYS = _ARGUMENTS | {"name", "type", "id"}
_NAME = re.compile(FUNCTION_NAME.removesuffix("$"))


class CallReader:
    """Parser of one JSON tool call. Push text until ``done`` or ``failed`` is true; ``rest`` is then available."""

    def __init__(self, is_offered: IsOffered, close: str = "") -> None:
        """Start before the call.

        Args:
            is_offered: Predicate for the names of functions that may be called.
            close: Tag that ends the call, even if its last brace is missing.
        """
        self._is_offered, self._close_tag = is_offered, close
        self._text = ""
        self._read = self._depth = 0
        self._in_string = self._escaped = False
        self.done = False
        self.failed = False

    @property
    def pushed(self) -> int:
        """Length of the text so far."""
        return len(self._text)

    @property
    def rest(self) -> str:
        """Text behind the object after ``done``, or all text after ``failed``."""
        return self._text[self._read :] if self.done else self._text

    def push(self, text: str) -> list[Delta]:
        """Add text and return the call once it is complete."""
        self._text += text
        begin = self._text.lstrip()
        if begin and begin[0] != "{":
            self.failed = True
            return []
        return self.end() if self._scan() else []

    def end(self) -> list[Delta]:
        """Return the call at the end of its text."""
        call = read_call(self._text[: self._read], lacks_brace=self._depth == 1)
        self.done = call is not None and self._is_offered(call.name)
        self.failed = not self.done
        return [call] if call is not None and self.done else []

    def _scan(self) -> bool:
        """Scan to the end of the text or of the call, and return whether the call ends. Strings are passed over.

        No JSON has a ``<`` outside of its strings: it begins the tag that ends the call, or the text is no call.
        """
        while self._read < len(self._text):
            char = self._text[self._read]
            if char == "<" and not self._in_string:
                tag = self._text[self._read : self._read + len(self._close_tag)]
                return tag == self._close_tag or not self._close_tag.startswith(tag)
            self._read += 1
            if self._escaped:
                self._escaped = False
            elif char == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = char == "\\"
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return True
        return False


def read_call(text: str, *, lacks_brace: bool = False) -> WrittenCall | None:
    """Return the call that a text is, or None if it is none.

    The arguments are ``{}`` if they are missing, null or "". A model may write them as a string, and control characters
    in strings without escapes. A call without its last brace (``lacks_brace``) counts if its arguments are there.
    """
    try:
        call = _loads(text + "}" * lacks_brace)
        if not isinstance(call, dict) or not call.keys() <= _KEYS or len(call.keys() & _ARGUMENTS) > 1:
            return None
        name, arguments = call.get("name"), next((call[key] for key in _ARGUMENTS if key in call), None)
        if isinstance(arguments, str):
            arguments = _loads(arguments) if arguments.strip() else None
        if arguments is None and not lacks_brace:
            arguments = {}
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
            return None
        return WrittenCall(name, object_text(arguments))
    except (ValueError, RecursionError):
        return None


def object_text(value: dict[str, Any]) -> str:
    """Return the text of a JSON object. Raises ValueError for NaN, infinities and halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()


def _loads(text: str) -> Any:
    """Parse JSON that may have control characters in strings. Raises ValueError."""
    return json.loads(text, strict=False, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# Parser of the tool call format of Hermes and Qwen models.

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEFORE_CLOSE = re.compile(r"[} \t\r\n]*")
_PIECE = 256
"""Characters of a call that are read at first."""


class HermesParser:
    """Streaming parser of the Hermes format.

    The output is text, then any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> elements. Invalid
    content between the tags remains text, so no output is lost. A closing tag ends a call whose last brace is missing,
    and further braces before it are dropped. The tag marks a call without doubt, so a call of a function that was not
    offered is returned too: the client can reply that there is no such function.
    """

    def __init__(self) -> None:
        self._held, self._at = "", 0
        """Text since the start of the last push or of the call, and the index up to which it is parsed."""
        self._before = ""
        """Whitespace before the opening tag. It is dropped if a call follows, and is text otherwise."""
        self._reader: CallReader | None = None
        self._closing = False
        self._called = False

    def push(self, text: str) -> list[Delta]:
        """Add text and return the output that is certain."""
        self._held, self._at = self._held[self._at :] + text, 0
        deltas: list[Delta] = []
        while True:
            before = (self._at, self._reader, self._closing)
            deltas += self._step()
            if before == (self._at, self._reader, self._closing):
                return deltas

    def end(self) -> list[Delta]:
        """Return the output held back, at the end of the text."""
        deltas: list[Delta] = []
        if self._reader is not None:
            deltas += self._reader.end() + self._after_call()
        rest, self._held, self._at = self._held[self._at :], "", 0
        if self._called and (not rest.strip() or self._closing):
            return deltas
        return deltas + text_deltas(rest)

    def _step(self) -> list[Delta]:
        """Process the held text once in the current state: outside a call, within it, or before the closing tag."""
        if self._reader is not None:
            return self._within_call()
        if self._closing:
            return self._close()
        return self._outside()

    def _outside(self) -> list[Delta]:
        tag = self._held.find(_OPEN, self._at)
        text = self._held[self._at : tag if tag >= 0 else None]
        if tag >= 0:
            self._at, self._reader = tag + len(_OPEN), CallReader(lambda name: True, _CLOSE)
            self._before = text[len(text.rstrip()) :]
            return text_deltas(text.rstrip())
        certain = len(text) - _undecided(text)
        self._at += certain
        return text_deltas(text[:certain])

    def _within_call(self) -> list[Delta]:
        reader = self._reader
        assert reader is not None
        deltas: list[Delta] = []
        # Pieces grow with the call: what begins no call, but has many tags, is not copied for each of them.
        while not (reader.done or reader.failed):
            begin = self._at + reader.pushed
            if not (piece := self._held[begin : begin + max(reader.pushed, _PIECE)]):
                break
            deltas += reader.push(piece)
        return deltas + self._after_call()

    def _after_call(self) -> list[Delta]:
        reader = self._reader
        assert reader is not None
        if reader.failed:
            # Parse the text again, because a tag in it can begin a call.
            self._reader = None
            return text_deltas(self._before + _OPEN)
        if reader.done:
            self._at, self._reader = self._at + reader.pushed - len(reader.rest), None
            self._closing = self._called = True
        return []

    def _close(self) -> list[Delta]:
        begin = _BEFORE_CLOSE.match(self._held, self._at).end()  # type: ignore[union-attr]
        if self._held.startswith(_CLOSE, begin):
            self._at, self._closing = begin + len(_CLOSE), False
        elif not _CLOSE.startswith(self._held[begin : begin + len(_CLOSE)]):
            self._closing = False  # the model left out the closing tag
        return []


def _undecided(text: str) -> int:
    """Return the length of the suffix of ``text`` that can be the start of an opening tag or whitespace before it."""
    tag = _overlap(text, _OPEN)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())


# Parser of the JSON tool call format of Llama 3.

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser:
    """Streaming parser of the Llama 3 JSON format.

    The whole output is {"name": ..., "parameters": {...}}, or several of these objects separated by ``;``. The format
    has no marker for calls, and JSON can also be the requested text. So the output is a call only if it names a
    function that the request offers.
    """

    def __init__(self, is_offered: IsOffered) -> None:
        self._is_offered = is_offered
        self._held = ""
        self._before = ""
        """Characters before the opening brace. They are dropped if a call follows, and are text otherwise."""
        self._reader: CallReader | None = None
        self._called = False
        self._text_only = False

    def push(self, text: str) -> list[Delta]:
        """Add text and return the output that is certain."""
        self._held += text
        deltas: list[Delta] = []
        while self._held and not self._text_only and self._begin():
            assert self._reader is not None
            text, self._held = self._held, ""
            deltas += self._reader.push(text)
            self._after_call(self._reader)
        if self._text_only:
            text, self._held = self._held, ""
            deltas += text_deltas(text)
        return deltas

    def end(self) -> list[Delta]:
        """Return the output held back, at the end of the text."""
        deltas: list[Delta] = []
        if self._reader is not None:
            deltas += self._reader.end()
            self._after_call(self._reader)
        rest, self._held = self._held, ""
        return deltas + ([] if self._called and not rest.strip(_BETWEEN) else text_deltas(rest))

    def _begin(self) -> bool:
        """Return whether a call reader is active, and start one at an opening brace.

        False means that more input is needed, or that the rest of the output is text.
        """
        if self._reader is not None:
            return True
        text = self._held.lstrip(_BETWEEN if self._called else None)
        if text.startswith(_TAG):
            text = text.removeprefix(_TAG).lstrip()
        elif _TAG.startswith(text):
            return False
        if text and text[0] != "{":
            self._text_only = True
            return False
        if text:
            self._before = self._held[: len(self._held) - len(text)]
            self._held, self._reader = text, CallReader(self._is_offered)
        return bool(text)

    def _after_call(self, reader: CallReader) -> None:
        if reader.failed or reader.done:
            self._held, self._reader = (self._before if reader.failed else "") + reader.rest, None
            self._text_only = reader.failed
            self._called = self._called or reader.done


# Parser of the pythonic tool call format of Llama 3.2 and 4.

_START, _END = "<|python_start|>", "<|python_end|>"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser:
    """Parser of the pythonic format.

    The whole output is a Python list of calls, such as [get_weather(city="Oslo"), now()]. It is parsed once it is
    complete, because only then a list of calls can be distinguished from text in brackets. Llama 4 may write it between
    two markers.
    """

    def __init__(self, is_offered: IsOffered) -> None:
        self._is_offered = is_offered
        self._held = ""
        self._text_only = False

    def push(self, text: str) -> list[Delta]:
        """Add text. It is returned at once if the output does not begin with a bracket, else held until ``end``."""
        self._held += text
        begin = self._held.lstrip().removeprefix(_START).lstrip()
        self._text_only = self._text_only or (bool(begin) and begin[0] != "[" and not _START.startswith(begin))
        if not self._text_only:
            return []
        shown, self._held = self._held, ""
        return text_deltas(shown)

    def end(self) -> list[Delta]:
        """Return the calls of the complete output, or its text if it is no list of valid calls."""
        text, self._held = self._held, ""
        try:
            calls = text.strip().removeprefix(_START).removesuffix(_END)
            expression = ast.parse(calls.strip(), mode="eval").body
            if not isinstance(expression, ast.List) or not expression.elts:
                raise ValueError("no list of calls")
            return [self._call(call) for call in expression.elts]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text_deltas(text)

    def _call(self, call: ast.expr) -> WrittenCall:
        """Convert one call. Raises ValueError unless it calls an offered function with literal keyword arguments."""
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not a call with named arguments")
        name = ast.unparse(call.func)
        if not self._is_offered(name):
            raise ValueError(f"{name} was not offered")
        arguments = {
            str(one.arg): ast.literal_eval(_Literals().visit(one.value)) for one in call.keywords if one.arg is not None
        }
        if len(arguments) < len(call.keywords):
            raise ValueError("** is no literal")
        return WrittenCall(name, object_text(arguments))


class _Literals(ast.NodeTransformer):
    """Reading of JSON's names of constants, which models write too, as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant of a name such as `true`, else the name."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


# Choice of the tool call parser for a model. The names are those of vLLM's --tool-call-parser.

# Text in the chat template that identifies the format, most specific first.
_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters":', "llama3_json"),
)
_OTHERS = (("<function=", "qwen3_coder"), ("<arg_key>", "glm45"), ("[TOOL_CALLS]", "mistral"))
"""Text that identifies formats without a parser here, which come first: some of them have the tags of Hermes too."""


def format_of(template_source: str) -> ToolFormat | None:
    """Return the tool call format that a chat template asks for; None if it is unknown or has no parser."""
    marks = () if other_format_of(template_source) else _MARKS
    return next((name for mark, name in marks if mark in template_source), None)


def other_format_of(template_source: str) -> str | None:
    """Return vLLM's name of the format that a chat template asks for, if it has no parser here."""
    return next((name for mark, name in _OTHERS if mark in template_source), None)


def parser_for(name: ToolFormat, functions: Sequence[str]) -> ToolParser:
    """Return a parser for one choice of a request that offers ``functions``."""
    is_offered = frozenset(functions).__contains__
    match name:
        case "hermes":
            return HermesParser()
        case "llama3_json":
            return Llama3JsonParser(is_offered)
        case "pythonic":
            return PythonicParser(is_offered)


# Separation of a model's thinking, which it writes between ``<think>`` and ``</think>``, from its answer.

_THINK, _THOUGHT = "<think>", "</think>"
_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that hold a tag which the chat template has rendered, and white space behind it."""


class ReasoningParser:
    """Streaming parser of one choice. Its concatenated output does not depend on how the text was split into pieces."""

    def __init__(self, *, inside: bool) -> None:
        """Start before the text; ``inside`` if it begins with thinking, also without the opening tag."""
        self._held = ""
        self._inside, self._at_start, self._over = inside, True, False

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Add text, and return the thinking and the answer that are certain; ``last`` ends the text."""
        if self._over:
            return "", text
        self._held += text
        if self._at_start:
            begin = self._held.lstrip()
            if not last and _THINK.startswith(begin[: len(_THINK)]) and len(begin) < len(_THINK):
                return "", ""
            self._at_start = False
            if begin.startswith(_THINK):
                self._held, self._inside = begin.removeprefix(_THINK), True
        if not self._inside:
            return "", self._rest()
        thought, tag, answer = self._held.partition(_THOUGHT)
        if tag:
            self._rest()
            return thought, answer
        kept = 0 if last else _overlap(thought, _THOUGHT)
        self._held = thought[len(thought) - kept :]
        return thought[: len(thought) - kept], ""

    def _rest(self) -> str:
        """Return the held text. The answer has begun."""
        rest, self._held, self._over = self._held, "", True
        return rest


def reasoning_parser(
    name: ReasoningFormat, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Callable[[], ReasoningParser]:
    """Return a function that makes parsers for the choices of a prompt.

    Chat templates may open the thinking, or close it at once to turn it off. ``deepseek_r1`` takes text for thinking
    where the template does neither; ``qwen3`` only behind an opening tag.
    """
    end = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    inside = end.endswith(_THINK) or (name == "deepseek_r1" and not end.endswith(_THOUGHT))
    return lambda: ReasoningParser(inside=inside)
