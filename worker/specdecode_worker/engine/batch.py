"""Batch of a step: its rows, and the shapes of those that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.engine.request import Request
from specdecode_worker.engine.shape_selector import Choice
from specdecode_worker.speculation.trees import PLAIN, Tree


@dataclass(slots=True)
class Row:
    """Part of one request in a step: ``count`` packed tokens, either a prefill chunk or the nodes of a draft tree.

    A chunk begins at position ``start``, which is -1 for a tree. ``emits`` is False for a chunk that does not end
    its prompt: such a row emits no token. A row is never changed; a frozen class would take 1 us more to create.
    """

    request: Request
    count: int
    tree: Tree = PLAIN
    start: int = -1
    emits: bool = True

    @property
    def is_chunk(self) -> bool:
        """True if the row is a prefill chunk."""
        return self.start >= 0

    @property
    def is_first_chunk(self) -> bool:
        """True if the row is the first chunk since the request was admitted."""
        return self.is_chunk and self.start == self.request.prefix

    @property
    def max_committed(self) -> int:
        """Upper bound of the positions that the step commits to the cache for this row."""
        return self.count if self.start >= 0 else self.tree.depth + 1


def decoding_rows(rows: Sequence[Row]) -> int:
    """Return the number of decoding rows of a batch. Its prefill chunks are behind them."""
    decoding = len(rows)
    while decoding and rows[decoding - 1].is_chunk:
        decoding -= 1
    return decoding


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step and the choice of shapes for its decoding requests; an empty choice if no request decodes."""

    rows: Sequence[Row]
    choice: Choice
