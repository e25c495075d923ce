"""Admission: requests wait here for a place on the workers, or for a first worker.

The places are this router's share of those of all ready workers, as the caller reports it. Waiting requests take
turns by tenant, tokens and priority. Without any worker they are held: the process can wake the operator meanwhile,
and they run in the same order as soon as a worker is there. Everything happens on one event loop, without
tasks of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import TracebackType

from specdecode_router.queueing import refusals
from specdecode_router.queueing.fair_queue import FairQueue, PriorityQueue
from specdecode_router.queueing.refusals import Refused
from specdecode_router.queueing.service_rate import ServiceRate
from specdecode_router.queueing.tenants import Tenant
from specdecode_router.settings import RouterSettings

TENANTS_WITH_ALL_BYTES = 4
"""Tenants that can fill the bytes of waiting bodies together: each may have this part of them."""


class Place:
    """Place of one request on the workers. It is a context manager that releases the place."""

    __slots__ = ("_admission", "_expected", "_queue", "_released", "output_tokens", "prompt_tokens", "tenant",
                 "waited_seconds")  # fmt: skip

    def __init__(self, admission: Admission, queue: FairQueue[_Waiter], tenant: Tenant, prompt_tokens: int) -> None:
        self._admission, self._queue = admission, queue
        self._expected = queue.start(tenant, prompt_tokens)
        self._released = False
        self.tenant = tenant
        self.waited_seconds = 0.0
        """Time from the request to the place."""
        self.prompt_tokens = self.output_tokens = 0
        """What the request has cost its workers. Its user sets both before the release."""

    def release(self) -> None:
        """Charge the tokens, and give the place to the next request. Further calls do nothing."""
        if not self._released:
            self._released = True
            self._queue.settle(self.tenant, self._expected, self.prompt_tokens, self.output_tokens)
            self._admission._leave(self.tenant)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class _Waiter:
    """One waiting request."""

    __slots__ = ("body_bytes", "deadline_timer", "future", "hold_timer", "prompt_tokens", "queue", "since", "tenant")

    def __init__(
        self,
        tenant: Tenant,
        queue: FairQueue[_Waiter],
        prompt_tokens: int,
        body_bytes: int,
        since: float,
        future: asyncio.Future[Place],
    ) -> None:
        self.tenant, self.queue, self.prompt_tokens, self.body_bytes = tenant, queue, prompt_tokens, body_bytes
        self.since, self.future = since, future
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.hold_timer: asyncio.TimerHandle | None = None


class Admission:
    """Bounded queue for the places of this router. It belongs to one event loop."""

    def __init__(
        self,
        limits: RouterSettings,
        clock: Callable[[], float],
        tenant_limit: Callable[[str, int], int] = lambda tenant, limit: limit,
    ) -> None:
        """Start without places.

        Args:
            limits: Settings with the bounds of the queue.
            clock: Monotonic clock in seconds.
            tenant_limit: Returns the part of a tenant's ``max_in_flight`` that is this router's now.
        """
        self.limits = limits
        """Bounds for requests that come now. They are replaced when settings change."""
        self._clock, self._tenant_limit = clock, tenant_limit
        self._capacity = 0
        self._limits_of_tenants: dict[tuple[str, int], int] = {}
        """Parts of ``max_in_flight``, by tenant and whole, until they may have changed."""
        self._running_of: dict[str, int] = {}
        """Number of places in use, by name of the tenant."""
        self.running = 0
        """Number of places in use."""
        self._queue: PriorityQueue[_Waiter] = PriorityQueue()
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        """All waiting requests in the order of their arrival."""
        self._bytes_of: Counter[str] = Counter()
        """Bytes of the bodies of waiting requests, by name of the tenant."""
        self._rate = ServiceRate(clock())
        self.on_held_change: Callable[[], None] | None = None
        """Called after each change of ``held``, on the event loop."""

    @property
    def held(self) -> int:
        """Number of requests that wait while there is no worker."""
        return 0 if self._capacity else len(self._waiters)

    @property
    def oldest_held_seconds(self) -> float:
        """Time since the arrival of the oldest held request; 0 if none is held."""
        return self._clock() - next(iter(self._waiters)).since if self.held else 0.0

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place on the workers."""
        return len(self._waiters) if self._capacity else 0

    def set_capacity(self, places: int) -> None:
        """Set the number of places of this router. 0 holds requests; running ones are not affected.

        Call it also when the limits of tenants may have changed.
        """
        before, held = self._capacity, self.held
        self._limits_of_tenants.clear()
        self._capacity = max(places, 0)
        if before and not self._capacity:
            for waiter in self._waiters:
                self._start_hold_timer(waiter)
        elif self._capacity and not before:
            for waiter in self._waiters:
                _cancel(waiter.hold_timer)
        self._dispatch()
        self._update(held)

    async def acquire(
        self, tenant: Tenant, deadline_seconds: float | None, prompt_tokens: int = 0, body_bytes: int = 0
    ) -> Place:
        """Wait for a place. The request leaves the queue at once if its task is cancelled.

        Args:
            tenant: Tenant of the request.
            deadline_seconds: Time until the deadline of the request; None without one.
            prompt_tokens: Expected length of the prompt.
            body_bytes: Size of the body, which is kept while the request waits.

        Raises:
            Refused: 429 if the queue or the tenant's part of it is full, 503 if no worker is there and none came in
                time, 504 at the deadline.
        """
        if deadline_seconds is not None and deadline_seconds <= 0:
            raise refusals.deadline_passed(deadline_seconds)
        queue = self._queue.of(batch=tenant.priority > 0)
        if self.running < self._capacity and self._may_run(tenant) and not self._queue.length_of(tenant.name):
            # Requests that wait although a place is free are of tenants at their own limit. It may have been raised: a
            # new request of such a tenant joins its line, which gives the line the new limit, and the oldest enters.
            return self._enter(tenant, queue, prompt_tokens)
        self._check_bounds(tenant, body_bytes)
        waiter = self._add(tenant, queue, prompt_tokens, body_bytes, deadline_seconds)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise

    def _check_bounds(self, tenant: Tenant, body_bytes: int) -> None:
        """Raise Refused if one more request must not wait.

        In a full queue the tenant with the most waiting requests makes room, so that it cannot shut out the others.
        """
        mine, now, most_bytes = self._queue.length_of(tenant.name), self._clock(), self.limits.max_waiting_bytes
        too_large = self._bytes_of[tenant.name] + body_bytes > most_bytes // TENANTS_WITH_ALL_BYTES
        if tenant.name and (mine >= self.limits.max_waiting_per_tenant or too_large):
            share = self._queue.share_of(tenant)
            raise refusals.tenant_is_full(mine, self._rate.retry_seconds(mine, now, share=share))
        if self._bytes_of.total() + body_bytes > most_bytes:
            raise self._full(now)
        limit = self.limits.max_waiting if self._capacity else self.limits.max_held
        if len(self._waiters) < limit:
            return
        excess = self._queue.excess_over(tenant)
        refused = self._full(now)
        if excess is None:
            raise refused
        self._fail(excess, refused)

    def _full(self, now: float) -> Refused:
        """Return the error of a request for which the queue has no room."""
        if self._capacity == 0:
            return refusals.held_is_full(self.held)
        return refusals.queue_is_full(self.waiting, self._rate.retry_seconds(self.waiting, now))

    def _add(
        self,
        tenant: Tenant,
        queue: FairQueue[_Waiter],
        prompt_tokens: int,
        body_bytes: int,
        deadline_seconds: float | None,
    ) -> _Waiter:
        held = self.held
        loop = asyncio.get_running_loop()
        waiter = _Waiter(tenant, queue, prompt_tokens, body_bytes, self._clock(), loop.create_future())
        if deadline_seconds is not None:
            error = refusals.deadline_passed(deadline_seconds)
            waiter.deadline_timer = loop.call_later(deadline_seconds, self._fail, waiter, error)
        if self._capacity == 0:
            self._start_hold_timer(waiter)
        self._waiters[waiter] = None
        self._bytes_of[tenant.name] += body_bytes
        queue.push(tenant, waiter)
        self._dispatch()
        self._update(held)
        return waiter

    def _start_hold_timer(self, waiter: _Waiter) -> None:
        seconds = self.limits.hold_seconds
        loop = waiter.future.get_loop()
        waiter.hold_timer = loop.call_later(seconds, self._fail, waiter, refusals.hold_timed_out(seconds))

    def _fail(self, waiter: _Waiter, error: Refused) -> None:
        """End the wait of a request with an error."""
        self._remove(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _abandon(self, waiter: _Waiter) -> None:
        """Remove a request whose task is cancelled, or release the place that it got in the same moment."""
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()
        else:
            self._remove(waiter)

    def _remove(self, waiter: _Waiter) -> None:
        if waiter not in self._waiters:
            return
        held = self.held
        waiter.queue.remove(waiter.tenant.name, waiter)
        self._forget(waiter)
        self._update(held)

    def _forget(self, waiter: _Waiter) -> None:
        del self._waiters[waiter]
        self._bytes_of[waiter.tenant.name] -= waiter.body_bytes
        if not self._bytes_of[waiter.tenant.name]:
            del self._bytes_of[waiter.tenant.name]
        _cancel(waiter.deadline_timer)
        _cancel(waiter.hold_timer)

    def _dispatch(self) -> None:
        """Give free places to waiting requests."""
        while self.running < self._capacity:
            waiter = self._queue.pop(self._may_run)
            if waiter is None:
                return
            self._forget(waiter)
            # A future that is cancelled belongs to a task that is about to leave.
            if not waiter.future.done():
                place = self._enter(waiter.tenant, waiter.queue, waiter.prompt_tokens)
                place.waited_seconds = self._clock() - waiter.since
                waiter.future.set_result(place)

    def _may_run(self, tenant: Tenant) -> bool:
        if tenant.max_in_flight is None:
            return True
        key = (tenant.name, tenant.max_in_flight)
        if (limit := self._limits_of_tenants.get(key)) is None:
            limit = self._limits_of_tenants[key] = self._tenant_limit(*key)
        return self._running_of.get(tenant.name, 0) < limit

    def _enter(self, tenant: Tenant, queue: FairQueue[_Waiter], prompt_tokens: int) -> Place:
        self.running += 1
        self._running_of[tenant.name] = self._running_of.get(tenant.name, 0) + 1
        return Place(self, queue, tenant, prompt_tokens)

    def _leave(self, tenant: Tenant) -> None:
        """Take a place back and give it to the next request."""
        self.running -= 1
        self._running_of[tenant.name] -= 1
        if not self._running_of[tenant.name]:
            del self._running_of[tenant.name]
        self._rate.add_departure(self._clock())
        held = self.held
        self._dispatch()
        self._update(held)

    def _update(self, held_before: int) -> None:
        """Record whether requests wait for a place, and report a change of the held ones."""
        self._rate.set_busy(self._clock(), self.waiting > 0)
        if self.on_held_change is not None and self.held != held_before:
            self.on_held_change()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
