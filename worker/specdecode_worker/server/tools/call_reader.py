"""One call written as a JSON object, {"name": ..., "arguments": {...}}, read while it is being written.

In that order, which models keep nearly always, name and arguments leave as they come; in any other the whole object
is awaited. Llama says ``parameters`` where others say ``arguments``.
"""

from __future__ import annotations

import json
import re
from typing import Any

from specdecode_worker.server.tools.deltas import Arguments, Called, Delta, Known

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)


class Braces:
    """Finds where a JSON object ends, a character at a time; braces within strings do not count."""

    __slots__ = ("_escaped", "_in_string", "closed", "depth")

    def __init__(self) -> None:
        self.depth = 0
        self.closed = False
        self._in_string = self._escaped = False

    def take(self, letter: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self.depth += 1
        elif letter in "}]":
            self.depth -= 1
            self.closed = self.depth <= 0


class CallReader:
    """Push text until ``done`` or ``failed``; ``rest`` is then what stands behind the object, or all of the text."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._text = ""
        self._read = 0
        self._braces = Braces()
        self._arguments_from: int | None = None
        self._arguments_over = False
        self.done = False
        self.failed = False

    @property
    def rest(self) -> str:
        assert self.done or self.failed
        return self._text[self._read :] if self.done else self._text

    def push(self, text: str) -> list[Delta]:
        assert not self.done
        assert not self.failed
        self._text += text
        begin = self._text.lstrip()
        if begin and begin[0] != "{":
            self.failed = True
            return []
        deltas = self._header()
        if shown := self._scan():
            deltas.append(Arguments(shown))
        if self._braces.closed:
            return deltas + self._close()
        return deltas

    def end(self) -> None:
        """No more text comes. A call that had begun stays one, cut short; anything else was none."""
        if not self.done:
            self.failed = self._arguments_from is None
            self.done = not self.failed

    def _header(self) -> list[Delta]:
        if self._arguments_from is not None or (found := _HEADER.match(self._text)) is None:
            return []
        name = _loads(found[1])
        if not isinstance(name, str) or not self._known(name):
            return []
        # The brace has only just come, or this would have matched before: nothing behind it was read yet.
        self._arguments_from = found.end()
        return [Called(name)]

    def _scan(self) -> str:
        """Reads on, to the end of the object at most; returns what it read of the arguments."""
        shown = []
        while self._read < len(self._text) and not self._braces.closed:
            letter = self._text[self._read]
            within = self._arguments_from is not None and self._read >= self._arguments_from
            self._braces.take(letter)
            self._read += 1
            if within and not self._arguments_over:
                shown.append(letter)
                self._arguments_over = self._braces.depth <= 1
        return "".join(shown)

    def _close(self) -> list[Delta]:
        if self._arguments_from is None:
            return self._take_whole()
        self.done = True
        return []

    def _take_whole(self) -> list[Delta]:
        found = _loads(self._text[: self._read])
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or not self._known(name):
            self.failed = True
            return []
        self.done = True
        arguments = found.get("arguments", found.get("parameters", {}))
        return [Called(name), Arguments(arguments if isinstance(arguments, str) else json.dumps(arguments))]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
