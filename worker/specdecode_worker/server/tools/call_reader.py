"""Streaming parser of one tool call that is a JSON object: {"name": ..., "arguments": {...}}.

With the name first, the usual order of models, name and arguments are returned as they arrive. With another order they
are returned once the object is complete. Llama models write ``parameters`` instead of ``arguments``.
"""

from __future__ import annotations

import json
import re
from typing import Any

from specdecode_worker.server.tools.deltas import ArgumentsDelta, CallStart, Delta, IsOffered

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)


class JsonEndFinder:
    """Depth counter that finds the end of a JSON object, character by character. Braces within strings do not count."""

    __slots__ = ("_escaped", "_in_string", "closed", "depth")

    def __init__(self) -> None:
        self.depth = 0
        self.closed = False
        self._in_string = self._escaped = False

    def push(self, char: str) -> None:
        """Process the next character. ``closed`` becomes true at the end of the object."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            self.closed = self.depth <= 0


class CallReader:
    """Parser of one JSON tool call. Push text until ``done`` or ``failed`` is true; ``rest`` is then available."""

    def __init__(self, is_offered: IsOffered) -> None:
        self._is_offered = is_offered
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
        deltas = self._header()
        if shown := self._scan():
            deltas.append(ArgumentsDelta(shown))
        if self._json_end.closed:
            return deltas + self._close()
        return deltas

    def end(self) -> None:
        """Mark the end of the text.

        Once the arguments have begun, the call is done, although truncated. Otherwise the parser has failed.
        """
        if not self.done:
            self.failed = self._arguments_from is None
            self.done = not self.failed

    def _header(self) -> list[Delta]:
        """Return the start of the call once the name and the opening brace of the arguments have arrived."""
        if self._arguments_from is not None or (header_match := _HEADER.match(self._text)) is None:
            return []
        name = _loads(header_match[1])
        if not isinstance(name, str) or not self._is_offered(name):
            return []
        # The opening brace is in the latest piece, else the pattern had matched before: no argument text was scanned.
        self._arguments_from = header_match.end()
        return [CallStart(name)]

    def _scan(self) -> str:
        """Scan to the end of the text or of the object, and return the argument text in it."""
        shown = []
        while self._read < len(self._text) and not self._json_end.closed:
            char = self._text[self._read]
            in_arguments = self._arguments_from is not None and self._read >= self._arguments_from
            self._json_end.push(char)
            self._read += 1
            if in_arguments and not self._arguments_over:
                shown.append(char)
                self._arguments_over = self._json_end.depth <= 1
        return "".join(shown)

    def _close(self) -> list[Delta]:
        if self._arguments_from is None:
            return self._parse_complete()
        self.done = True
        return []

    def _parse_complete(self) -> list[Delta]:
        """Parse the complete object, for calls that do not begin with the name."""
        call = _loads(self._text[: self._read])
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not self._is_offered(name):
            self.failed = True
            return []
        self.done = True
        arguments = call.get("arguments", call.get("parameters", {}))
        return [CallStart(name), ArgumentsDelta(arguments if isinstance(arguments, str) else json.dumps(arguments))]


def _loads(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
