"""Share of one router in what several routers of the same workers use together: places, or the limit of a tenant. Pure.

Every router has a certain share, which it may always use. The certain shares add up to the whole, so routers that are
all busy use the whole and no more. What others leave free may be borrowed: each router takes its part of what the
workers report as free, so that borrowers together never take more than that, and again at the next load. A router with
all clients has half of the free places after about ``0.7 * routers`` loads. When the others get clients, they use their
certain shares at once, and a borrower gives all back that is then too much, as its streams end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterShare:
    """One of ``routers`` that share."""

    routers: int
    rank: int
    """Place of the router in the order of all, from 0."""
    turn: int = 0
    """Number that grows with the time. It decides who may borrow what cannot be divided."""

    def places(self, total: int, *, lendable: int, own: int, used: int) -> int:
        """Return how many places the router may use. With more routers than places each has one.

        Args:
            total: Places of all routers.
            lendable: Places up to which free ones may be borrowed.
            own: Places that this router had at the last load.
            used: Places that all routers had then, this one included.
        """
        certain = max(self._part(total, self.rank), min(total, 1))
        free = lendable - used
        borrowing = own + (self._part(free, (self.rank + self.turn) % self.routers) if free > 0 else free)
        return max(certain, borrowing) if self.routers > 1 else certain

    def _part(self, amount: int, rank: int) -> int:
        """Return a part of an amount. The parts of all ranks add up to it."""
        whole, rest = divmod(amount, self.routers)
        return whole + (rank < rest)
