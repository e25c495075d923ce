"""Bound of the memory that request bodies take while they arrive, for all clients together."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self


class BodyBudget:
    """Bytes that all bodies may hold together while they arrive. The default has no bound."""

    def __init__(self, max_bytes: float = math.inf) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class BodyReservation:
    """Share of one body in the budget. It ends with the ``with`` block."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self.exceeded = False
        """True once the budget had no place for the body, which then holds nothing more."""

    def grow(self, count: int) -> bool:
        """Reserve ``count`` more bytes. Return False, and hold nothing, if the budget is or was exceeded."""
        if self.exceeded or self._budget.held_bytes + count > self._budget.max_bytes:
            self.exceeded = True
            self.release()
            return False
        self._held_bytes += count
        self._budget.held_bytes += count
        return True

    def release(self) -> None:
        """Return all reserved bytes to the budget."""
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
