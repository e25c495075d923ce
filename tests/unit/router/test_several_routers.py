"""Eight routers over two workers: together they use the workers' places, and share them among tenants by tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from support.router_harness import RouterUnderTest, routers_over
from support.stand_in_worker import Script

SLOTS = 4
PLACES = 2 * (SLOTS + 2)
TOKENS = {"heavy": 4, "light": 12}
"""Tokens of a request. By requests, weights of 3 and 1 would give both the same number of tokens."""


async def peak(routers: list[RouterUnderTest], seconds: float) -> tuple[int, float]:
    """Return the 95th percentile of the streams on the workers, and the mean.

    A stall of this process may let a load show less than what runs, and lend one place too many for a moment.
    """
    seen = []
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        await asyncio.sleep(0.005)
        seen.append(sum(one.running for one in routers[0].workers))
    return sorted(seen)[int(0.95 * len(seen))], sum(seen) / len(seen)


@pytest.mark.slow
async def test_eight_routers_share_places_and_tenants_share_tokens_by_weight(tmp_path: Path) -> None:
    for name in TOKENS:
        (tmp_path / name).write_text(f"key-of-{name}")
    (tmp_path / "tenants.json").write_text(json.dumps({"tenants": {"heavy": {"weight": 3}}}))
    finished: Counter[str] = Counter()

    async def ask(router: RouterUnderTest, tenant: str) -> None:
        """Send one request after the other."""
        headers = {"Authorization": f"Bearer key-of-{tenant}"}
        for number in itertools.count():
            conversation = [{"role": "user", "content": f"{tenant} {router.port} {number}"}]
            body = {"messages": conversation, "stream": True, "max_tokens": TOKENS[tenant]}
            status, _, answer = await router.post("/v1/chat/completions", json=body, headers=headers)
            assert (status, b"[DONE]" in answer) == (200, True)
            finished[tenant] += TOKENS[tenant]

    scripts = [Script(interval_seconds=0.03, max_num_seqs=SLOTS) for _ in range(2)]
    async with routers_over(8, *scripts, load_seconds=0.2, api_keys_path=str(tmp_path)) as routers:
        await asyncio.sleep(0.5)  # all workers know all routers, and all routers know that
        clients = [asyncio.create_task(ask(router, name)) for router in routers for name in [*TOKENS] * 4]
        await asyncio.sleep(2)
        before = finished.copy()
        most, mean = await peak(routers, 10)
        tokens = finished - before
        for client in clients:
            client.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended
        assert most <= PLACES
        assert mean > 0.9 * PLACES
        assert tokens["heavy"] / tokens["light"] == pytest.approx(3, rel=0.2), tokens
