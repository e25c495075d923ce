"""What a parser makes of text, and what every parser is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins; the Arguments that follow belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the last call's arguments, which join to the text of a JSON object."""

    text: str


Delta = Said | Called | Arguments
Known = Callable[[str], bool]
"""Whether the request offers a function of this name."""


class ToolParser(Protocol):
    """Reads one answer. What it gives does not depend on how the text was cut into pieces, once joined."""

    def push(self, text: str) -> list[Delta]: ...

    def end(self) -> list[Delta]:
        """What was held back, once no more text can come."""
        ...


def said(text: str) -> list[Delta]:
    return [Said(text)] if text else []
