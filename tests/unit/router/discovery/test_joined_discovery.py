"""Workers of several deployments as one list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from specdecode_router.discovery.joined import JoinedDiscovery
from specdecode_router.workers.worker import Endpoint


class Source:
    """Discovery that reports on request."""

    def __init__(self) -> None:
        self.report: Callable[[Sequence[Endpoint]], None] = lambda endpoints: None

    async def run(self, update: Callable[[Sequence[Endpoint]], None]) -> None:
        self.report = update
        await asyncio.Event().wait()


async def test_workers_have_their_deployment_and_none_come_before_the_own_ones() -> None:
    own, other = Source(), Source()
    updates: list[list[tuple[str, str]]] = []
    joined = JoinedDiscovery("old", {"old": own, "new": other})
    task = asyncio.create_task(
        joined.run(lambda endpoints: updates.append([(one.name, one.deployment) for one in endpoints]))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    other.report([Endpoint("n", "http://n")])
    assert updates == []
    own.report([Endpoint("a", "http://a")])
    other.report([])
    own.report([])
    assert updates == [[("a", "old"), ("n", "new")], [("a", "old")], []]
    task.cancel()
