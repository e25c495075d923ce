"""Simulation of eight routers that share twelve places: tenants get tokens by weight, whatever their requests are."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from specdecode_router.queueing.admission import Admission
from specdecode_router.queueing.tenants import Tenant
from specdecode_router.settings import RouterSettings
from specdecode_router.workers.router_share import RouterShare
from support.virtual_loop import run_virtual

ROUTERS = 8
PLACES = 12
SECONDS_PER_TOKEN = 0.01
OUTPUT = {"heavy": 50, "light": 300}
"""Mean output of a request."""
PROMPT = {"heavy": 20, "light": 2000}


async def cost_of(weights: dict[str, float], seconds: float) -> Counter[str]:
    """Return the cost of finished requests by tenant: prompt tokens and twice the output."""
    loop = asyncio.get_running_loop()
    cost: Counter[str] = Counter()
    most = running = 0

    async def client(queue: Admission, tenant: Tenant, seed: int) -> None:
        nonlocal most, running
        randomness = random.Random(seed)
        while loop.time() < seconds:
            prompt, output = PROMPT[tenant.name], 1 + int(randomness.expovariate(1 / OUTPUT[tenant.name]))
            with await queue.acquire(tenant, 0, None, prompt) as place:
                running += 1
                most = max(most, running)
                await asyncio.sleep(output * SECONDS_PER_TOKEN)
                running -= 1
                place.prompt_tokens, place.output_tokens = prompt, output
            if loop.time() < seconds:
                cost[tenant.name] += prompt + 2 * output

    async with asyncio.TaskGroup() as group:
        for rank in range(ROUTERS):
            queue = Admission(RouterSettings(), loop.time)
            queue.set_capacity(RouterShare(ROUTERS, rank).places(PLACES, lendable=0, own=0, used=PLACES))
            for seed in range(4):
                for name, weight in weights.items():
                    group.create_task(client(queue, Tenant(name, weight), 100 * rank + seed))
    assert most == PLACES
    return cost


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_of_eight_routers_share_tokens_by_weight(weight: float) -> None:
    cost = run_virtual(cost_of({"heavy": weight, "light": 1.0}, 500))
    assert cost["heavy"] / cost["light"] == pytest.approx(weight, rel=0.05), cost
