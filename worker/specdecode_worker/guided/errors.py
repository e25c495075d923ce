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
    """Return the first line of a message of the library. Its context can be long."""
    lines = message.replace("<non-verbose/>", "").strip().splitlines()
    return lines[0][:500] if lines else "the grammar cannot be used"
