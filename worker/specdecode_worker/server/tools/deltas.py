"""Output types and interface of the tool call parsers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text content of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call. The `ArgumentsDelta` that follow belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Part of the arguments of the latest call. The parts of one call concatenate to the text of a JSON object."""

    text: str


Delta = TextDelta | CallStart | ArgumentsDelta
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
    return [TextDelta(text)] if text else []
