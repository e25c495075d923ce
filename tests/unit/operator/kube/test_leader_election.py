"""Leader election by a Lease, with a Lease in memory and a clock of the test."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from specdecode_operator.errors import Conflict, NotLeader, Unavailable
from specdecode_operator.kube.kinds import LEASES
from specdecode_operator.kube.leader_election import LeaderElector, micro_time
from support.background import background
from support.clock import Clock


class LeaseServer:
    """Fake client of an API server with one Lease."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False
        self.hangs = False
        self.requests: list[str] = []
        self.doubts: list[float] = []

    def doubt_watches(self, seconds: float) -> None:
        self.doubts.append(seconds)

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    async def get(self, *_: Any) -> dict[str, Any] | None:
        await self._arrive("get")
        return copy.deepcopy(self.lease)

    async def create(self, kind: Any, lease: dict[str, Any], *, guarded: bool) -> dict[str, Any]:
        assert not guarded
        await self._arrive("create")
        if self.lease is not None:
            raise Conflict("exists")
        return self._store(lease, 1)

    async def update(self, kind: Any, lease: dict[str, Any], *, guarded: bool) -> dict[str, Any]:
        assert (kind, guarded) == (LEASES, False)
        await self._arrive("update")
        if lease["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict("changed")
        return self._store(lease, int(lease["metadata"]["resourceVersion"]) + 1)

    async def _arrive(self, request: str) -> None:
        self.requests.append(request)
        if self.hangs:
            await asyncio.sleep(60)
        if self.away:
            raise Unavailable("away")

    def _store(self, lease: dict[str, Any], version: int) -> dict[str, Any]:
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(version)
        return copy.deepcopy(self.lease)


@pytest.fixture
def server() -> LeaseServer:
    return LeaseServer()


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def elector(server: Any, clock: Clock, identity: str, **options: Any) -> LeaderElector:
    return LeaderElector(server, namespace="ns", name="lease", identity=identity, clock=clock, **options)


@pytest.fixture
async def leader(server: LeaseServer, clock: Clock) -> LeaderElector:
    first = elector(server, clock, "one")
    await first.attempt()
    return first


async def test_the_first_one_leads_and_renews_with_one_request(server: LeaseServer, clock: Clock) -> None:
    first = elector(server, clock, "one")
    with pytest.raises(NotLeader):
        first.check()
    await first.attempt()
    assert first.check() == 15
    await asyncio.wait_for(first.wait_until_leader(), 1)
    assert server.spec["holderIdentity"] == "one"
    assert (server.spec["leaseTransitions"], server.spec["leaseDurationSeconds"]) == (0, 15)
    acquired = server.spec["acquireTime"]
    server.requests.clear()
    clock.now += 2
    await first.attempt()
    assert server.requests == ["update"]
    assert (server.spec["acquireTime"], server.spec["leaseTransitions"]) == (acquired, 0)
    assert server.spec["renewTime"] > acquired


async def test_another_takes_over_when_the_lease_did_not_change_for_its_duration(
    server: LeaseServer, clock: Clock, leader: LeaderElector
) -> None:
    second = elector(server, clock, "two")
    clock.now += 8
    await second.attempt()
    clock.now += 1
    await leader.attempt()
    clock.now += 1
    await second.attempt()
    clock.now += 14.9
    await second.attempt()
    assert not second.is_leader, "the duration counts from when the second saw the change"
    clock.now += 0.1
    await second.attempt()
    assert second.is_leader
    assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("two", 1)
    await leader.attempt()
    assert not leader.is_leader
    assert leader.lost.is_set()


async def test_remote_times_are_never_compared(server: LeaseServer, clock: Clock, leader: LeaderElector) -> None:
    second = elector(server, clock, "two")
    server.spec["renewTime"] = "1999-01-01T00:00:00.000000Z"
    await second.attempt()
    assert not second.is_leader


async def test_leadership_ends_by_the_own_clock_before_others_take_over(
    server: LeaseServer, clock: Clock, leader: LeaderElector
) -> None:
    clock.now += 9.9
    assert leader.check() == pytest.approx(5.1)
    clock.now += 0.1
    with pytest.raises(NotLeader):
        leader.check()
    assert not leader.lost.is_set()
    server.away = True
    await leader.attempt()
    assert leader.lost.is_set()
    server.away = False
    await leader.attempt()
    assert leader.is_leader
    assert not leader.lost.is_set()
    assert server.spec["leaseTransitions"] == 0, "the Lease was never another's"


async def test_a_failed_renewal_ends_nothing_before_the_deadline(
    server: LeaseServer, clock: Clock, leader: LeaderElector
) -> None:
    server.away = True
    clock.now += 4
    await leader.attempt()
    assert leader.check() == 11
    assert not leader.lost.is_set()


async def test_the_time_of_a_renewal_is_the_start_of_its_request(
    server: LeaseServer, clock: Clock, leader: LeaderElector
) -> None:
    update = server.update

    async def slow(*arguments: Any, **options: Any) -> dict[str, Any]:
        clock.now += 3
        return await update(*arguments, **options)

    server.update = slow  # type: ignore[method-assign]
    await leader.attempt()
    assert leader.check() == 12


async def test_a_hanging_renewal_is_given_up_at_the_deadline(server: LeaseServer) -> None:
    options = {"lease_seconds": 3, "renew_deadline": 1, "retry_seconds": 0.1}
    first = LeaderElector(server, namespace="ns", name="l", identity="one", **options)  # type: ignore[arg-type]
    async with background(first.run()):
        await asyncio.wait_for(first.wait_until_leader(), 1)
        server.hangs = True
        await asyncio.wait_for(first.lost.wait(), 1.5)
        assert not first.is_leader
        assert 0 < server.doubts[0] < 1, "open watches may be as dead as this request"


async def test_the_loser_of_a_race_does_not_lead(server: LeaseServer, clock: Clock) -> None:
    first, second = elector(server, clock, "one"), elector(server, clock, "two")
    get = server.get

    async def overtaken(*arguments: Any) -> dict[str, Any] | None:
        seen = await get(*arguments)
        server.get = get  # type: ignore[method-assign]
        await second.attempt()
        return seen

    server.get = overtaken  # type: ignore[method-assign]
    await first.attempt()
    assert (first.is_leader, second.is_leader) == (False, True)


async def test_an_own_request_that_arrived_late_is_no_loss(
    server: LeaseServer, clock: Clock, leader: LeaderElector
) -> None:
    server._store({**(server.lease or {}), "spec": {**server.spec, "renewTime": micro_time()}}, 7)
    clock.now += 2
    await leader.attempt()
    assert leader.check() == 15
    assert not leader.lost.is_set()


async def test_a_released_lease_is_taken_at_once(server: LeaseServer, clock: Clock, leader: LeaderElector) -> None:
    second = elector(server, clock, "two")
    await second.attempt()
    await leader.release()
    with pytest.raises(NotLeader):
        leader.check()
    assert "holderIdentity" not in server.spec
    await second.attempt()
    assert second.is_leader
    assert (server.spec["leaseTransitions"], server.spec["leaseDurationSeconds"]) == (1, 15)


async def test_only_the_own_lease_is_released(server: LeaseServer, clock: Clock) -> None:
    first, second = elector(server, clock, "one"), elector(server, clock, "two")
    await second.release()
    await first.attempt()
    await second.release()
    assert server.spec["holderIdentity"] == "one"
    server.away = True
    await first.release()
    assert not first.is_leader, "a release that fails still ends leadership"


async def test_a_deleted_lease_is_made_again(server: LeaseServer, clock: Clock, leader: LeaderElector) -> None:
    update = server.update

    async def conflict(*_: Any, **__: Any) -> dict[str, Any]:
        raise Conflict("gone")

    server.update, server.lease = conflict, None  # type: ignore[method-assign]
    await leader.attempt()
    server.update = update  # type: ignore[method-assign]
    assert leader.is_leader


@pytest.mark.parametrize("times", [(10, 10, 2), (15, 2, 2), (15, 10, 0)])
def test_times_that_contradict_are_refused(server: LeaseServer, clock: Clock, times: tuple[float, ...]) -> None:
    names = ("lease_seconds", "renew_deadline", "retry_seconds")
    with pytest.raises(ValueError, match="renew_deadline"):
        elector(server, clock, "one", **dict(zip(names, times, strict=True)))
