"""Tests of discovery over an API server that fails in every way, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdecode_router.discovery import endpoint_slices
from specdecode_router.discovery.api_server import ApiServerError, VersionExpired, _status_error
from specdecode_router.discovery.endpoint_slices import EndpointSliceDiscovery
from specdecode_router.discovery.joined import JoinedDiscovery
from specdecode_router.workers.worker import Endpoint
from support.background import background


def slice_of(*workers: str, name: str = "s", version: str = "1") -> dict[str, Any]:
    endpoints = [{"addresses": ["10.0.0.1"], "targetRef": {"name": worker}} for worker in workers]
    return {
        "metadata": {"name": name, "resourceVersion": version},
        "addressType": "IPv4",
        "ports": [{"name": "admin", "port": 8001}],
        "endpoints": endpoints,
    }


class FakeApi:
    """API server with scripted answers; afterwards it does not answer at all."""

    def __init__(self, lists: Sequence[Any], watches: Sequence[Any]) -> None:
        self.lists, self.watches = list(lists), list(watches)
        self.listed, self.versions = 0, list[str]()

    async def list_slices(self, namespace: str, service: str) -> tuple[list[dict[str, Any]], str]:
        assert (namespace, service) == ("ns", "demo-workers")
        if not self.lists:
            await asyncio.Event().wait()
        self.listed += 1
        answer = self.lists.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, f"list-{self.listed}"

    async def watch_slices(
        self, namespace: str, service: str, version: str, seconds: int
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self.versions.append(version)
        if not self.watches:
            await asyncio.Event().wait()
        for event in self.watches.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_slices, "MIN_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(endpoint_slices, "MAX_RETRY_SECONDS", 0.002)


@asynccontextmanager
async def running(lists: Sequence[Any], watches: Sequence[Any]) -> AsyncIterator[tuple[FakeApi, list[list[str]]]]:
    api, updates = FakeApi(lists, watches), list[list[str]]()

    def update(endpoints: Sequence[Endpoint]) -> None:
        updates.append([one.name for one in endpoints])

    discovery = EndpointSliceDiscovery(api, "ns", "demo-workers")  # type: ignore[arg-type]
    async with background(discovery.run(update)):
        await asyncio.sleep(0.05)
        yield api, updates


async def test_changes_are_reported_with_all_workers() -> None:
    watch = [("ADDED", slice_of("b", name="t", version="2")), ("DELETED", slice_of("a", version="3"))]
    async with running([[slice_of("a")]], [watch]) as (api, updates):
        assert updates == [["a"], ["a", "b"], ["b"]]
        assert api.versions == ["list-1", "3"]


async def test_a_watch_that_brings_nothing_new_reports_nothing() -> None:
    watch = [("MODIFIED", slice_of("a", version="5")), ("BOOKMARK", slice_of(version="9"))]
    async with running([[slice_of("a")]], [watch]) as (api, updates):
        assert updates == [["a"]]
        assert (api.listed, api.versions[-1]) == (1, "9"), "it is resumed after the bookmark, without a list"


async def test_the_last_list_stays_while_the_api_server_is_gone() -> None:
    gone = [ApiServerError("no answer")] * 4
    async with running([[slice_of("a")], *gone, [slice_of("a", "b")]], [[ApiServerError("cut")]]) as (api, updates):
        assert updates == [["a"], ["a", "b"]]
        assert api.listed == 6


async def test_the_absence_of_workers_is_reported() -> None:
    async with running([[]], []) as (_, updates):
        assert updates == [[]]


async def test_an_expired_version_is_listed_again_and_workers_that_left_leave() -> None:
    lists = [[slice_of("a"), slice_of("b", name="t")], [slice_of("a")]]
    async with running(lists, [[VersionExpired("410")]]) as (api, updates):
        assert updates == [["a", "b"], ["a"]]
        assert api.versions == ["list-1", "list-2"]


async def test_a_watch_that_ends_at_once_counts_as_an_error() -> None:
    """A proxy that answers every watch with an empty body must not be asked a thousand times a second."""
    async with running([[slice_of("a")], [slice_of("a")]], [[]]) as (api, _):
        assert api.listed == 2


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        ({"code": 410, "message": "too old resource version"}, VersionExpired, "410 too old"),
        ({"code": 403, "message": "forbidden"}, ApiServerError, "403 forbidden"),
        (None, ApiServerError, "502 without"),
        ("text", ApiServerError, "502 without"),
    ],
)
def test_errors_of_the_api_server_are_distinguished(status: Any, kind: type[Exception], text: str) -> None:
    error = _status_error(status, 502)
    assert type(error) is kind
    assert str(error).startswith(text)


# --- several deployments --------------------------------------------------------------------------------------------


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
