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
