"""Errors of guided decoding."""

from __future__ import annotations


class GrammarRefused(Exception):
    """Error for a grammar that cannot be used.

    ``path`` names the part of a JSON schema at fault, as steps from its root; empty for the whole grammar.
    """

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.path = path


def library_message(message: str) -> str:
    """Return the first line of a message of the library, or a short text that it announces. Its context can be long."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").strip().splitlines()]
    if not lines:
        return "the grammar cannot be used"
    return " ".join(lines[:4] if lines[0].endswith(":") else lines[:1])[:500]
