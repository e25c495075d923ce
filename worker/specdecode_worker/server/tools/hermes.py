"""Parser of the tool call format of Hermes and Qwen models.

The output is text, then any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> elements. Invalid
content between the tags remains text, so no output is lost. A closing tag ends a call whose last brace is missing, and
further braces before it are dropped. The tag marks a call without doubt, so a call of a function
that was not offered is returned too: the client can reply that there is no such function.
"""

from __future__ import annotations

from specdecode_worker.server.tools.call_reader import CallReader
from specdecode_worker.server.tools.deltas import Delta, text_deltas

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Streaming parser of the Hermes format, which the module docstring describes."""

    def __init__(self, *, streams: bool = False) -> None:
        self._streams = streams
        self._held = ""
        self._before = ""
        """Whitespace before the opening tag. It is dropped if a call follows, and is text otherwise."""
        self._reader: CallReader | None = None
        self._closing = False
        self._called = False

    def push(self, text: str) -> list[Delta]:
        """Add text and return the output that is certain."""
        self._held += text
        deltas: list[Delta] = []
        while True:
            before = (len(self._held), self._reader, self._closing)
            deltas += self._step()
            if before == (len(self._held), self._reader, self._closing):
                return deltas

    def end(self) -> list[Delta]:
        """Return the output held back, at the end of the text."""
        deltas: list[Delta] = []
        if self._reader is not None:
            deltas += self._reader.end() + self._after_call()
        rest, self._held = self._held, ""
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
        text, tag, rest = self._held.partition(_OPEN)
        if tag:
            self._held, self._reader = rest, self._new_reader()
            self._before = text[len(text.rstrip()) :]
            return text_deltas(text.rstrip())
        keep = _undecided(self._held)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text_deltas(text)

    def _new_reader(self) -> CallReader:
        return CallReader(lambda name: True, streams=self._streams, close=_CLOSE)

    def _within_call(self) -> list[Delta]:
        assert self._reader is not None
        text, self._held = self._held, ""
        deltas = self._reader.push(text) if text else []
        return deltas + self._after_call()

    def _after_call(self) -> list[Delta]:
        reader = self._reader
        assert reader is not None
        if reader.failed:
            # Parse the text again, because a tag in it can begin a call.
            self._held, self._reader = reader.rest + self._held, None
            return text_deltas(self._before + _OPEN)
        if reader.done:
            self._held, self._reader = reader.rest + self._held, None
            self._closing = self._called = True
        return []

    def _close(self) -> list[Delta]:
        begin = self._held.lstrip("} \t\r\n")
        if begin.startswith(_CLOSE):
            self._held, self._closing = begin.removeprefix(_CLOSE), False
        elif not _CLOSE.startswith(begin):
            self._closing = False  # the model left out the closing tag
        return []


def _undecided(text: str) -> int:
    """Return the length of the suffix of ``text`` that can be the start of an opening tag or whitespace before it."""
    tag = next((n for n in range(min(len(_OPEN) - 1, len(text)), 0, -1) if text.endswith(_OPEN[:n])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())
