"""Parser of the JSON tool call format of Llama 3.

The whole output is {"name": ..., "parameters": {...}}, or several of these objects separated by ``;``. The format has
no marker for calls, and JSON can also be the requested text. So the output is a call only if it names a function that
the request offers.
"""

from __future__ import annotations

from specdecode_worker.server.tools.call_reader import CallReader
from specdecode_worker.server.tools.deltas import Delta, IsOffered, text_deltas

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser:
    """Streaming parser of the Llama 3 JSON format, which the module docstring describes."""

    def __init__(self, is_offered: IsOffered, *, streams: bool = False) -> None:
        self._is_offered, self._streams = is_offered, streams
        self._held = ""
        self._before = ""
        """Characters before the opening brace. They are dropped if a call follows, and are text otherwise."""
        self._reader: CallReader | None = None
        self._called = False
        self._text_only = False

    def push(self, text: str) -> list[Delta]:
        """Add text and return the output that is certain."""
        if self._text_only:
            return text_deltas(text)
        self._held += text
        deltas: list[Delta] = []
        while self._held and not self._text_only and self._begin():
            assert self._reader is not None
            text, self._held = self._held, ""
            deltas += self._reader.push(text)
            deltas += self._after_call()
        return deltas + self._as_text()

    def end(self) -> list[Delta]:
        """Return the output held back, at the end of the text."""
        deltas: list[Delta] = []
        if self._reader is not None:
            deltas += self._reader.end() + self._after_call()
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
            self._held, self._reader = text, CallReader(self._is_offered, streams=self._streams)
        return bool(text)

    def _after_call(self) -> list[Delta]:
        reader = self._reader
        assert reader is not None
        if reader.failed or reader.done:
            self._held, self._reader = (self._before if reader.failed else "") + reader.rest, None
            self._text_only = reader.failed
            self._called = self._called or reader.done
        return []

    def _as_text(self) -> list[Delta]:
        if not self._text_only:
            return []
        text, self._held = self._held, ""
        return text_deltas(text)
