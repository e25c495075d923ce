"""Weighted fair queue of tenants, and the two priority classes that are made of two such queues.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with requests of equal length: every tenant has a virtual
start time that grows by 1/weight with each of its requests, and the tenant with the smallest one comes next. A tenant
that had no waiting requests continues at the current virtual time: it cannot save up turns, and its first request lets
at most one request of each other tenant of its weight pass.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from specdecode_router.queueing.tenants import Tenant

INTERACTIVE_RUN = 7
"""Interactive requests in a row that pass waiting batch requests. Batch gets at least every eighth place."""

Item = TypeVar("Item", bound=Hashable)


class _Line(Generic[Item]):
    """Waiting requests of one tenant in the order of their arrival."""

    __slots__ = ("items", "parked", "queued", "start", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.items: OrderedDict[Item, None] = OrderedDict()
        self.start = 0.0
        """Virtual start time of the next request."""
        self.queued = False
        """True while an entry of the heap refers to this line."""
        self.parked = False
        """True while the tenant has as many requests running as it may have."""


class FairQueue(Generic[Item]):
    """Queue in which tenants take turns by weight. Every operation takes O(log tenants), amortised."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}
        self._heap: list[tuple[float, int, _Line[Item]]] = []
        self._entries = 0
        """Number of entries pushed so far. Tenants with an equal start time come in the order of their entries."""
        self._virtual_time = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: Tenant, item: Item) -> None:
        """Add a request at the end of its tenant's line."""
        line = self._lines.get(tenant.name)
        if line is None:
            line = self._lines[tenant.name] = _Line(tenant)
        line.tenant = tenant  # its weight may have changed
        line.items[item] = None
        self._size += 1
        self._enter(line)

    def pop(self, may_run: Callable[[Tenant], bool]) -> Item | None:
        """Remove and return the next request of a tenant that may run one; None if there is none.

        A tenant that may not is left out from then on, until ``unpark``.
        """
        while self._heap:
            _, _, line = heapq.heappop(self._heap)
            line.queued = False
            if not line.items:
                continue
            if not may_run(line.tenant):
                line.parked = True
                continue
            item, _ = line.items.popitem(last=False)
            self._virtual_time = max(self._virtual_time, line.start)
            line.start += 1 / line.tenant.weight
            self._enter(line)
            self._shrink()
            return item
        return None

    def remove(self, tenant: str, item: Item) -> None:
        """Remove a request wherever it is in the line of its tenant. Its tenant's turn is not used up."""
        line = self._lines.get(tenant)
        if line is not None and item in line.items:
            del line.items[item]
            self._shrink()

    def unpark(self, tenant: str) -> None:
        """Let a tenant take part again."""
        line = self._lines.get(tenant)
        if line is not None and line.parked:
            line.parked = False
            self._enter(line)

    def length_of(self, tenant: str) -> int:
        """Return the number of waiting requests of a tenant."""
        line = self._lines.get(tenant)
        return len(line.items) if line else 0

    def newest_of(self, tenant: str) -> Item | None:
        """Return the last request in the line of a tenant; None if it has none."""
        line = self._lines.get(tenant)
        return next(reversed(line.items), None) if line else None

    def tenants(self) -> Iterator[Tenant]:
        """Yield the tenants that have waiting requests."""
        return (line.tenant for line in self._lines.values() if line.items)

    def _enter(self, line: _Line[Item]) -> None:
        """Put a line into the heap, unless it is there, empty or parked."""
        if line.queued or line.parked or not line.items:
            return
        line.start = max(line.start, self._virtual_time)
        line.queued = True
        self._entries += 1
        heapq.heappush(self._heap, (line.start, self._entries, line))

    def _shrink(self) -> None:
        """Count one request less. A queue that became empty starts over, which also forgets tenants that are gone."""
        self._size -= 1
        if self._size == 0:
            self._lines.clear()
            self._heap.clear()
            self._virtual_time = 0.0


class PriorityQueue(Generic[Item]):
    """Two fair queues: interactive requests come first, and batch requests at least once after each INTERACTIVE_RUN."""

    def __init__(self) -> None:
        self.interactive: FairQueue[Item] = FairQueue()
        self.batch: FairQueue[Item] = FairQueue()
        self._run = 0
        """Interactive requests since the last batch request, while batch requests were waiting."""

    def __len__(self) -> int:
        return len(self.interactive) + len(self.batch)

    def push(self, tenant: Tenant, item: Item, *, batch: bool) -> None:
        """Add a request."""
        (self.batch if batch else self.interactive).push(tenant, item)

    def pop(self, may_run: Callable[[Tenant], bool]) -> Item | None:
        """Remove and return the next request of a tenant that may run one; None if there is none."""
        order = (self.interactive, self.batch)
        for queue in order if self._run < INTERACTIVE_RUN else reversed(order):
            batch_waits = len(self.batch) > 0
            item = queue.pop(may_run)
            if item is not None:
                self._run = self._run + 1 if queue is self.interactive and batch_waits else 0
                return item
        return None

    def remove(self, tenant: str, item: Item) -> None:
        """Remove a request, if it is there."""
        self.interactive.remove(tenant, item)
        self.batch.remove(tenant, item)

    def unpark(self, tenant: str) -> None:
        """Let a tenant take part again."""
        self.interactive.unpark(tenant)
        self.batch.unpark(tenant)

    def length_of(self, tenant: str) -> int:
        """Return the number of waiting requests of a tenant."""
        return self.interactive.length_of(tenant) + self.batch.length_of(tenant)

    def share_of(self, tenant: Tenant) -> float:
        """Return the share of departures that a tenant gets while all that wait keep waiting, from 0 to 1."""
        weights = {name: other.weight for name, other in self._tenants().items()} | {tenant.name: tenant.weight}
        return tenant.weight / sum(weights.values())

    def excess_over(self, tenant: Tenant) -> Item | None:
        """Return the request that should make room for one more of a tenant in a full queue.

        It is the newest one, batch first, of the tenant with the most waiting requests by weight. None if ``tenant``
        would then be that tenant itself. It takes O(tenants).
        """
        waiting = self._tenants().values()
        longest = max(waiting, key=lambda other: self.length_of(other.name) / other.weight, default=tenant)
        length = self.length_of(longest.name) / longest.weight
        if longest.name == tenant.name or length <= (self.length_of(tenant.name) + 1) / tenant.weight:
            return None
        newest = self.batch.newest_of(longest.name)
        return newest if newest is not None else self.interactive.newest_of(longest.name)

    def _tenants(self) -> dict[str, Tenant]:
        """Return the tenants that have waiting requests, by name."""
        return {tenant.name: tenant for queue in (self.interactive, self.batch) for tenant in queue.tenants()}
