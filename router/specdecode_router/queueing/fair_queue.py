"""Weighted fair queue of tenants by tokens, and the two priority classes that are made of two such queues.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with the token costs of VTC (Sheng et al., OSDI 2024), as
in the worker's queue: a prompt token costs 1 and an output token 2, divided by the weight of the tenant. The tenant
with the smallest cost comes next. One that was absent continues at the level of the tenant that was served last, so it
neither saves up turns nor waits for the others. A running request counts with what it is expected to cost, by the mean
output of its tenant, until it ends and its tokens are known: else a tenant would get all places for as long as its
first requests run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from specdecode_router.queueing.tenants import Tenant

OUTPUT_COST = 2
"""Cost of an output token in prompt tokens, as at the worker and in VTC."""
FIRST_OUTPUT_TOKENS = 256.0
"""Expected output of a tenant's first request."""
_FORGETTING_FACTOR = 0.9
"""Factor of the mean output of a tenant at each request, so that about the last ten decide."""
INTERACTIVE_RUN = 7
"""Interactive requests in a row that pass waiting batch requests. Batch gets at least every eighth place."""

Item = TypeVar("Item", bound=Hashable)


@dataclass(slots=True)
class _Account:
    """Tokens of one tenant."""

    used: float
    """Cost of the requests that ended, divided by the weight of the tenant."""
    running: float = 0.0
    """Expected cost of those that run, divided by the weight."""
    output: float | None = None
    """Mean output of its requests; None before the first one has ended."""


class _Line(Generic[Item]):
    """Waiting requests of one tenant, each with its number, in the order of their arrival."""

    __slots__ = ("items", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.items: OrderedDict[Item, int] = OrderedDict()


class FairQueue(Generic[Item]):
    """Queue in which tenants take turns by tokens and weight."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Item]] = {}
        """Lines of the tenants that have waiting requests."""
        self._accounts: dict[str, _Account] = {}
        self._level = 0.0
        """Cost of the requests that had ended of the tenant that was served last."""
        self._pushed = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: Tenant, item: Item) -> None:
        """Add a request at the end of its tenant's line."""
        self._enter(tenant)
        line = self._lines.setdefault(tenant.name, _Line(tenant))
        line.tenant = tenant  # its weight may have changed
        line.items[item] = self._pushed
        self._pushed += 1
        self._size += 1

    def pop(self, may_run: Callable[[Tenant], bool]) -> Item | None:
        """Remove and return the next request of a tenant that may run one; None if there is none."""
        ready = [line for line in self._lines.values() if may_run(line.tenant)]
        if not ready:
            return None
        line = min(ready, key=self._order)
        item = next(iter(line.items))
        self.remove(line.tenant.name, item)
        return item

    def start(self, tenant: Tenant, prompt_tokens: int) -> float:
        """Charge a request that starts to run, whether it has waited or not. Return its expected cost by weight."""
        account = self._enter(tenant)
        self._level = max(self._level, account.used)
        output = FIRST_OUTPUT_TOKENS if account.output is None else account.output
        expected = (prompt_tokens + OUTPUT_COST * output) / tenant.weight
        account.running += expected
        return expected

    def settle(self, tenant: Tenant, expected: float, prompt_tokens: int, output_tokens: int) -> None:
        """Replace the expected cost of a request that ended by what it did cost."""
        account = self._accounts[tenant.name]
        account.running -= expected
        account.used += (prompt_tokens + OUTPUT_COST * output_tokens) / tenant.weight
        if output_tokens:  # else it was cancelled or refused, which says nothing of the next one
            mean = output_tokens if account.output is None else account.output
            account.output = _FORGETTING_FACTOR * mean + (1 - _FORGETTING_FACTOR) * output_tokens

    def remove(self, tenant: str, item: Item) -> None:
        """Remove a request wherever it is in the line of its tenant. Its tenant's turn is not used up."""
        line = self._lines.get(tenant)
        if line is not None and item in line.items:
            del line.items[item]
            self._size -= 1
            if not line.items:
                del self._lines[tenant]

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
        return (line.tenant for line in self._lines.values())

    def _order(self, line: _Line[Item]) -> tuple[float, int]:
        account = self._accounts[line.tenant.name]
        return account.used + account.running, next(iter(line.items.values()))

    def _enter(self, tenant: Tenant) -> _Account:
        """Return the account of a tenant. Unless requests of it wait, it is below the level by what runs at most."""
        account = self._accounts.setdefault(tenant.name, _Account(self._level))
        if tenant.name not in self._lines:
            account.used = max(account.used, self._level - account.running)
        return account


class PriorityQueue(Generic[Item]):
    """Two fair queues: interactive requests come first, and batch requests at least once after each INTERACTIVE_RUN."""

    def __init__(self) -> None:
        self.interactive: FairQueue[Item] = FairQueue()
        self.batch: FairQueue[Item] = FairQueue()
        self._run = 0
        """Interactive requests since the last batch request, while batch requests were waiting."""

    def __len__(self) -> int:
        return len(self.interactive) + len(self.batch)

    def of(self, *, batch: bool) -> FairQueue[Item]:
        """Return the queue of a class."""
        return self.batch if batch else self.interactive

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
