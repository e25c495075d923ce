"""Simulation of two tenants with unequal load on one queue: the small one is served as its share permits."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from specdecode_router.queueing.admission import Admission
from specdecode_router.queueing.refusals import Refused
from specdecode_router.queueing.tenants import Tenant
from specdecode_router.settings import RouterSettings
from support.virtual_loop import run_virtual

PLACES = 8
SERVICE_SECONDS = 2.0
"""Mean time of a request, so all places together serve four requests per second."""
TOKENS_PER_SECOND = 50
SMALL_RATE = 1.4
"""Requests per second of the small tenant: 70 % of its fair share, which is half of the places."""
LARGE_RATE = 10 * SMALL_RATE
SECONDS = 1000.0


@dataclass
class Times:
    """Times of the small tenant's requests."""

    waits: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


async def times_of_small(large_rate: float, places: int = PLACES, weight: float = 1.0) -> Times:
    """Return the times of the small tenant while a large one sends ``large_rate`` requests per second."""
    loop = asyncio.get_running_loop()
    queue = Admission(RouterSettings(), loop.time)
    queue.set_capacity(places)
    times = Times()

    async def request(tenant: Tenant, seconds: float) -> None:
        try:
            place = await queue.acquire(tenant, 0, None)
        except Refused:
            assert tenant.name == "large"
            return
        with place:
            await asyncio.sleep(seconds)
            place.output_tokens = int(seconds * TOKENS_PER_SECOND)
        if tenant.name == "small":
            times.waits.append(place.waited_seconds)
            times.latencies.append(place.waited_seconds + seconds)

    async def arrivals(tenant: Tenant, rate: float, seed: int) -> None:
        randomness = random.Random(seed)
        async with asyncio.TaskGroup() as group:
            while loop.time() < SECONDS:
                await asyncio.sleep(randomness.expovariate(rate))
                group.create_task(request(tenant, randomness.expovariate(1 / SERVICE_SECONDS)))

    async with asyncio.TaskGroup() as group:
        group.create_task(arrivals(Tenant("small", weight), SMALL_RATE, 1))
        if large_rate:
            group.create_task(arrivals(Tenant("large"), large_rate, 2))
    assert len(times.waits) > 1000
    return times


def p95(times: list[float]) -> float:
    return sorted(times)[int(0.95 * len(times))]


def test_a_tenant_with_ten_times_the_load_at_most_doubles_the_times_of_the_small_one() -> None:
    """The large tenant offers 3.5 times what all places serve.

    The latency is compared with that of the small tenant alone. Its wait alone would be zero on all places, so the wait
    is compared with that on its fair share of the places, alone.
    """
    alone, own_half, shared = (
        run_virtual(times_of_small(*load)) for load in ((0.0,), (0.0, PLACES // 2), (LARGE_RATE,))
    )
    assert p95(shared.latencies) <= 2 * p95(alone.latencies)
    assert p95(shared.waits) <= 2 * p95(own_half.waits)


@pytest.mark.slow
def test_more_weight_shortens_the_wait() -> None:
    equal, heavier = (run_virtual(times_of_small(LARGE_RATE, weight=weight)) for weight in (1.0, 4.0))
    assert p95(heavier.waits) < 0.8 * p95(equal.waits)
