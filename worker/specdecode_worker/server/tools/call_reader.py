"""Parser of one tool call that is a JSON object: {"name": ..., "arguments": {...}}.

A call has a name that clients can send back, and arguments that are a JSON object; any other text is no call. It is
therefore returned once it is complete. Only where a grammar assures it, name and arguments are returned as they arrive.
Llama models write ``parameters`` instead of ``arguments``.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from specdecode_worker.server.tools.deltas import ArgumentsDelta, CallStart, Delta, IsOffered

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
"""Names of functions, as OpenAI defines them, and with dots."""
_ARGUMENTS = frozenset(("arguments", "parameters"))
_KEYS = _ARGUMENTS | {"name", "type", "id"}
_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_NAME = re.compile(FUNCTION_NAME.removesuffix("$"))
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonEndFinder:
    """Depth counter that finds the end of a JSON object, character by character. Braces within strings do not count."""

    __slots__ = ("_escaped", "closed", "depth", "in_string")

    def __init__(self) -> None:
        self.depth = 0
        self.closed = False
        self.in_string = self._escaped = False

    def push(self, char: str) -> None:
        """Process the next character. ``closed`` becomes true at the end of the object."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            self.closed = self.depth <= 0


class CallReader:
    """Parser of one JSON tool call. Push text until ``done`` or ``failed`` is true; ``rest`` is then available."""

    def __init__(self, is_offered: IsOffered, *, streams: bool, close: str = "") -> None:
        """Start before the call.

        Args:
            is_offered: Predicate for the names of functions that may be called.
            streams: Return name and arguments as they arrive; a grammar assures that they are valid.
            close: Tag that ends the call, even if its last brace is missing.
        """
        self._is_offered, self._streams, self._close_tag = is_offered, streams, close
        self._text = ""
        self._read = 0
        self._json_end = JsonEndFinder()
        self._arguments_from: int | None = None
        self._arguments_over = False
        self.done = False
        self.failed = False

    @property
    def rest(self) -> str:
        """Text behind the object after ``done``, or all text after ``failed``."""
        assert self.done or self.failed
        return self._text[self._read :] if self.done else self._text

    def push(self, text: str) -> list[Delta]:
        """Add text and return the parts of the call that are complete."""
        assert not self.done
        assert not self.failed
        self._text += text
        begin = self._text.lstrip()
        if begin and begin[0] != "{":
            self.failed = True
            return []
        deltas = self._header() if self._streams else []
        shown, ended = self._scan()
        if shown:
            deltas.append(ArgumentsDelta(shown))
        return deltas + (self.end() if ended else [])

    def end(self) -> list[Delta]:
        """Return the call at the end of its text. One that streams is done, even if it was cut off."""
        if self._arguments_from is not None:
            self.done = True
            return []
        call = read_call(self._text[: self._read], lacks_brace=self._json_end.depth == 1)
        self.done = call is not None and self._is_offered(call[0])
        self.failed = not self.done
        return [CallStart(call[0]), ArgumentsDelta(call[1])] if call is not None and self.done else []

    def _header(self) -> list[Delta]:
        """Return the start of the call once the name and the opening brace of the arguments have arrived."""
        if self._arguments_from is not None or (header_match := _HEADER.match(self._text)) is None:
            return []
        try:
            name = json.loads(header_match[1])
        except ValueError:
            return []
        if not self._is_offered(name):
            return []
        # The opening brace is in the latest piece, else the pattern had matched before: no argument text was scanned.
        self._arguments_from = header_match.end()
        return [CallStart(name)]

    def _scan(self) -> tuple[str, bool]:
        """Scan to the end of the text or of the call. Return the argument text in it, and whether the call ends.

        No JSON has a ``<`` outside of its strings: it begins the tag that ends the call, or the text is no call.
        """
        shown: list[str] = []
        while self._read < len(self._text) and not self._json_end.closed:
            char = self._text[self._read]
            if char == "<" and not self._json_end.in_string:
                tag = self._text[self._read : self._read + len(self._close_tag)]
                return "".join(shown), tag == self._close_tag or not self._close_tag.startswith(tag)
            in_arguments = self._arguments_from is not None and self._read >= self._arguments_from
            self._json_end.push(char)
            self._read += 1
            if in_arguments and not self._arguments_over:
                shown.append(char)
                self._arguments_over = self._json_end.depth <= 1
        return "".join(shown), self._json_end.closed


def read_call(text: str, *, lacks_brace: bool = False) -> tuple[str, str] | None:
    """Return the name and the arguments of a call, or None if the text is no call.

    The arguments are the text of a JSON object as the model wrote it; ``{}`` if they are missing, null or "". A model
    may write them as a string, and control characters in strings without escapes. A call without its last brace
    (``lacks_brace``) counts if its arguments are there.
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
        return name, _written(text, arguments)
    except (ValueError, RecursionError):
        return None


def _written(text: str, arguments: dict[str, Any]) -> str:
    """Return arguments as a call has them, with control characters escaped; in other cases as JSON of our own."""
    ours = object_text(arguments)
    if (header := _HEADER.match(text)) is not None:
        _, end = json.JSONDecoder(strict=False).raw_decode(text, header.end())
        written = _STRING.sub(lambda part: _CONTROL.sub(_escaped, part[0]), text[header.end() : end])
        if json.loads(written) == arguments:
            return written
    return ours


def object_text(value: dict[str, Any]) -> str:
    """Return the text of a JSON object. Raises ValueError for NaN, infinities and halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode().decode()


def _escaped(control: re.Match[str]) -> str:
    return json.dumps(control[0])[1:-1]


def _loads(text: str) -> Any:
    """Parse JSON that may have control characters in strings. Raises ValueError."""
    return json.loads(text, strict=False, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
