"""Tests of the report of held requests: one write when demand appears, refreshes, and its removal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specdecode_router.discovery import demand
from specdecode_router.discovery.api_server import ApiServerError
from specdecode_router.discovery.demand import DemandWriter
from specdecode_worker.contract.demand import HeldRequests, held_requests, read_demand
from support.background import background

NOW = 10_000.0


class FakeApi:
    """ConfigMap in memory; ``failures`` writes are refused first."""

    def __init__(self, data: dict[str, str] | None = None, failures: int = 0) -> None:
        self.data, self.failures, self.patches = dict(data or {}), failures, list[dict[str, str | None]]()

    async def config_map_data(self, namespace: str, name: str) -> dict[str, str]:
        return dict(self.data)

    async def patch_config_map(self, namespace: str, name: str, data: dict[str, str | None]) -> None:
        assert (namespace, name) == ("ns", "demo-demand")
        if self.failures:
            self.failures -= 1
            raise ApiServerError("no answer")
        self.patches.append(data)
        for key, value in data.items():
            if value is None:
                self.data.pop(key, None)
            else:
                self.data[key] = value

    def held(self, now: float = NOW) -> int:
        return held_requests(read_demand(self.data), now)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(demand, "MIN_WRITE_SECONDS", 0.005)


@asynccontextmanager
async def running(api: FakeApi, refresh_seconds: float = 60) -> AsyncIterator[DemandWriter]:
    writer = DemandWriter(
        api,  # type: ignore[arg-type]
        "ns",
        "demo-demand",
        "router-a",
        wall_clock=lambda: NOW,
        refresh_seconds=refresh_seconds,
    )
    async with background(writer.run()):
        await asyncio.sleep(0.02)
        yield writer


async def test_one_write_when_demand_appears_and_one_when_it_ends() -> None:
    api = FakeApi()
    async with running(api) as writer:
        before = len(api.patches)
        for count in range(1, 21):
            writer.set_held(count, count / 10)
        await asyncio.sleep(0.05)
        assert read_demand(api.data)["router-a"] == HeldRequests(requests=20, oldest_seconds=2.0, at=NOW)
        assert len(api.patches) == before + 1
        writer.set_held(0, 0)
        await asyncio.sleep(0.05)
        assert api.data == {}
        assert len(api.patches) == before + 2


async def test_demand_is_refreshed_while_it_lasts() -> None:
    api = FakeApi()
    async with running(api, refresh_seconds=0.02) as writer:
        writer.set_held(1, 0)
        await asyncio.sleep(0.02)
        writer.set_held(5, 0)
        await asyncio.sleep(0.1)
        assert api.held() == 5
        assert len(api.patches) >= 4


async def test_nothing_is_written_at_rest() -> None:
    api = FakeApi()
    async with running(api, refresh_seconds=0.005) as writer:
        before = len(api.patches)
        writer.set_held(0, 0)
        await asyncio.sleep(0.05)
        assert len(api.patches) == before <= 1


async def test_a_failed_write_is_repeated() -> None:
    api = FakeApi()
    async with running(api) as writer:
        api.failures = 3
        writer.set_held(4, 0)
        await asyncio.sleep(0.1)
        assert api.held() == 4


async def test_an_entry_of_an_earlier_process_is_removed_at_the_start() -> None:
    stale = HeldRequests(requests=3, at=NOW - 1).model_dump_json()
    api = FakeApi({"router-a": stale})
    async with running(api):
        assert api.data == {}


async def test_entries_of_dead_routers_are_removed_and_those_of_others_stay() -> None:
    dead, alive = (HeldRequests(requests=1, at=NOW - age).model_dump_json() for age in (10_000, 30))
    api = FakeApi({"router-dead": dead, "router-b": alive})
    async with running(api):
        assert set(api.data) == {"router-b"}


async def test_quick_turns_of_demand_are_few_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "MIN_WRITE_SECONDS", 0.05)
    api = FakeApi()
    start = time.monotonic()
    async with running(api) as writer:
        for _ in range(100):
            writer.set_held(1, 0)
            await asyncio.sleep(0.001)
            writer.set_held(0, 0)
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.15)
        elapsed = time.monotonic() - start
        assert len(api.patches) <= 3 + elapsed / demand.MIN_WRITE_SECONDS, "a write for each turn would be 200"
        assert api.data == {}


def test_stale_and_unreadable_entries_count_nothing() -> None:
    entries = {
        "fresh": HeldRequests(requests=2, at=NOW - 59).model_dump_json(),
        "stale": HeldRequests(requests=5, at=NOW - 61).model_dump_json(),
        "ahead": HeldRequests(requests=1, at=NOW + 500).model_dump_json(),
        "broken": "{",
        "empty": '{"requests": 0, "at": 1}',
        "endless": '{"requests": 1, "at": 1e999}',
    }
    assert held_requests(read_demand(entries), NOW) == 3
