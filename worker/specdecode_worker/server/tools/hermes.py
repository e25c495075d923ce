"""Hermes' and Qwen's way: any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> behind some text.

What stands between the tags and is no call stays text, so that nothing of an answer is lost. The tag says that a call
is meant, so a name that was not offered is passed on: the client can answer that there is no such function.
"""

from __future__ import annotations

from specdecode_worker.server.tools.call_reader import CallReader
from specdecode_worker.server.tools.deltas import Delta, said

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """See the module."""

    def __init__(self) -> None:
        self._held = ""
        self._before = ""
        """The space in front of the tag: no text if a call follows."""
        self._reader: CallReader | None = None
        self._closing = False
        self._called = False

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while True:
            before = (len(self._held), self._reader, self._closing)
            deltas += self._step()
            if before == (len(self._held), self._reader, self._closing):
                return deltas

    def end(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._reader is not None:
            self._reader.end()
            deltas += self._after_call()
        rest, self._held = self._held, ""
        if self._called and (not rest.strip() or self._closing):
            return deltas
        return deltas + said(rest)

    def _step(self) -> list[Delta]:
        if self._reader is not None:
            return self._within_call()
        if self._closing:
            return self._close()
        return self._outside()

    def _outside(self) -> list[Delta]:
        text, tag, rest = self._held.partition(_OPEN)
        if tag:
            self._held, self._reader = rest, CallReader(lambda name: True)
            self._before = text[len(text.rstrip()) :]
            return said(text.rstrip())
        keep = _undecided(self._held)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return said(text)

    def _within_call(self) -> list[Delta]:
        assert self._reader is not None
        text, self._held = self._held, ""
        deltas = self._reader.push(text) if text else []
        return deltas + self._after_call()

    def _after_call(self) -> list[Delta]:
        reader = self._reader
        assert reader is not None
        if reader.failed:
            # Its text is read again: a tag in it may begin a call.
            self._held, self._reader = reader.rest + self._held, None
            return said(self._before + _OPEN)
        if reader.done:
            self._held, self._reader = reader.rest + self._held, None
            self._closing = self._called = True
        return []

    def _close(self) -> list[Delta]:
        begin = self._held.lstrip()
        if begin.startswith(_CLOSE):
            self._held, self._closing = begin.removeprefix(_CLOSE), False
        elif not _CLOSE.startswith(begin):
            self._closing = False  # the model forgot it
        return []


def _undecided(text: str) -> int:
    """Length of the end of ``text`` that is the space before a tag, or may begin one."""
    tag = next((n for n in range(min(len(_OPEN) - 1, len(text)), 0, -1) if text.endswith(_OPEN[:n])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())
