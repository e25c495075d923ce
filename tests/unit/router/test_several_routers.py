"""Eight routers over two workers: together they use the workers' places, and share them among tenants by tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.router_harness import RouterUnderTest, routers_over
from support.stand_in_worker import Script

SLOTS = 4
PLACES = 2 * (SLOTS + 2)
TOKENS = {"heavy": 4, "light": 12}
"""Tokens of a request. By requests, weights of 3 and 1 would give both the same number of tokens."""


@contextlib.asynccontextmanager
async def eight(
    tmp_path: Path, settings: dict[str, object], token_seconds: float = 0.06
) -> AsyncIterator[list[RouterUnderTest]]:
    for name in TOKENS:
        (tmp_path / name).write_text(f"key-of-{name}")
    (tmp_path / "tenants.json").write_text(json.dumps({"tenants": settings}))
    scripts = [Script(interval_seconds=token_seconds, max_num_seqs=SLOTS) for _ in range(2)]
    async with routers_over(8, *scripts, load_seconds=0.2, api_keys_path=str(tmp_path)) as routers:
        await asyncio.sleep(0.5)  # all workers know all routers, and all routers know that
        yield routers


class Clients:
    """Clients that send one request after the other. ``tokens`` counts those of finished requests."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, router: RouterUnderTest, tenant: str, count: int) -> None:
        self._tasks += [asyncio.create_task(self._send(router, tenant)) for _ in range(count)]

    async def _send(self, router: RouterUnderTest, tenant: str) -> None:
        headers = {"Authorization": f"Bearer key-of-{tenant}"}
        for number in itertools.count():
            conversation = [{"role": "user", "content": f"{tenant} {router.port} {number}"}]
            body = {"messages": conversation, "stream": True, "max_tokens": TOKENS[tenant]}
            status, _, answer = await router.post("/v1/chat/completions", json=body, headers=headers)
            assert (status, b"[DONE]" in answer) == (200, True)
            self.tokens[tenant] += TOKENS[tenant]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def peak(routers: list[RouterUnderTest], seconds: float, tenant: str = "") -> tuple[int, float]:
    """Return the 95th percentile of the streams on the workers, of a tenant or of all, and the mean.

    A stall of this process may let a load show less than what runs, and lend one place too many for a moment.
    """
    seen = []
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        await asyncio.sleep(0.005)
        workers = routers[0].workers
        seen.append(sum(one.clients[tenant] if tenant else one.running for one in workers))
    return sorted(seen)[int(0.95 * len(seen))], sum(seen) / len(seen)


@pytest.mark.slow
async def test_eight_routers_share_places_and_tenants_share_tokens_by_weight(tmp_path: Path) -> None:
    async with eight(tmp_path, {"heavy": {"weight": 3}}, token_seconds=0.03) as routers:
        clients = Clients()
        for router in routers:
            clients.add(router, "heavy", 4)
            clients.add(router, "light", 4)
        await asyncio.sleep(2)
        before = clients.tokens.copy()
        most, mean = await peak(routers, 10)
        tokens = clients.tokens - before
        await clients.stop()
        assert most <= PLACES
        assert mean > 0.9 * PLACES
        assert tokens["heavy"] / tokens["light"] == pytest.approx(3, rel=0.2), tokens
