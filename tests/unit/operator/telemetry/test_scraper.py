"""Telemetry loop over real sockets: deployments whose workers hang delay only themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from socket_workers import Behaviour, GoodWorker, SocketWorkers, dripping, garbage, hanging, socket_workers

from specdecode_operator.api.v1alpha1 import PAUSED_ANNOTATION
from specdecode_operator.errors import OperatorError
from specdecode_operator.state.deployment_state import DeploymentState, Published, Readings, StateTable
from specdecode_operator.state.packed import Packed
from specdecode_operator.telemetry.scrape_round import ScrapeLimits, WorkerAccess
from specdecode_operator.telemetry.scraper import RoundTimes, Scraper, next_turn
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.telemetry.worker_poll import NOT_ASKED, Target
from specdecode_operator.types import Key
from specdecode_worker.contract import Plan

KEY = ("ns", "demo")
PERIOD_SECONDS = 0.4


@dataclass
class Bench:
    """A scraper over workers on sockets, with the calls that it makes."""

    workers: SocketWorkers
    client: WorkerClient
    period: float = PERIOD_SECONDS
    limits: ScrapeLimits = field(default_factory=ScrapeLimits)
    table: StateTable = field(default_factory=StateTable)
    targets: dict[Key, list[Target]] = field(default_factory=dict)
    tokens: tuple[str, ...] = ("secret",)
    notified: list[Key] = field(default_factory=list)
    unauthorized: list[Key] = field(default_factory=list)
    times: dict[Key, list[RoundTimes]] = field(default_factory=dict)
    guard: Callable[[], None] = lambda: None
    notify_error: Exception | None = None
    scraper: Scraper = field(init=False)

    def __post_init__(self) -> None:
        self.scraper = Scraper(
            self.table,
            self.client,
            targets=self._targets,
            access=lambda state: WorkerAccess(tokens=self.tokens),
            notify=self._notify,
            poll_seconds=self.period,
            limits=self.limits,
            guard=lambda: self.guard(),
            on_unauthorized=self.unauthorized.append,
            on_round=lambda key, times: self.times.setdefault(key, []).append(times),
        )

    async def add(self, *behaviours: Behaviour, key: Key = KEY) -> list[Target]:
        """Add workers to a deployment, which becomes known with the first of them."""
        added = []
        for behaviour in behaviours:
            number = len(self.targets.setdefault(key, []))
            address = await self.workers.add(behaviour)
            added.append(Target(uid=f"{key[1]}-{number}", name=f"{key[1]}-pod-{number}", address=address, ready=True))
            self.targets[key].append(added[-1])
        if self.table.get(key) is None:
            self.table.put(key, DeploymentState(resource=Packed.of(resource_of(key)), generation=1))
        return added

    def readings(self, key: Key = KEY) -> Readings:
        state = self.table.get(key)
        assert state is not None
        return state.readings

    def problems(self, key: Key = KEY) -> list[str | None]:
        """Return the problem of every worker, in the order of the targets."""
        return [self.readings(key).by_uid[target.uid].problem for target in self.targets[key]]

    async def rounds(self, count: int = 1, key: Key = KEY) -> None:
        """Wait for so many rounds from now on."""
        last = self.readings(key).round + count
        await self.until(lambda: self.readings(key).round >= last)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    def _targets(self, key: Key) -> Sequence[Target]:
        return self.targets[key]

    def _notify(self, key: Key) -> None:
        if self.notify_error:
            raise self.notify_error
        self.notified.append(key)


def resource_of(key: Key, **annotations: str) -> dict[str, Any]:
    return {"metadata": {"namespace": key[0], "name": key[1], "uid": "u", "annotations": annotations}}


@contextlib.asynccontextmanager
async def bench_of(*, deadline: float = 10, **fields: Any) -> AsyncIterator[Bench]:
    """Return a bench whose scraper runs until the end of the block."""
    async with socket_workers() as workers:
        client = WorkerClient(timeout_seconds=deadline)
        bench = Bench(workers, client, **fields)
        running = asyncio.create_task(bench.scraper.run())
        try:
            yield bench
        finally:
            assert not running.done(), "the loop survives everything"
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()


# --- readings ---------------------------------------------------------------------------------------------------------


async def test_readings_are_written_and_notified_every_period() -> None:
    async with bench_of() as bench:
        await bench.add(GoodWorker(), GoodWorker())
        await bench.until(lambda: bench.readings().round >= 1)
        began, first = time.monotonic(), bench.readings().round
        await bench.rounds(4)
        assert 3 * PERIOD_SECONDS < time.monotonic() - began < 6 * PERIOD_SECONDS
        readings = bench.readings()
        assert all(reading.report is not None for reading in readings.by_uid.values())
        assert abs(readings.at - time.time()) < PERIOD_SECONDS + 1
        assert bench.notified == [KEY] * readings.round
        assert bench.scraper.counters.rounds >= first + 3
        assert bench.scraper.counters.reports == 2 * readings.round


async def test_an_unchanged_report_is_not_fetched_again() -> None:
    async with bench_of() as bench:
        await bench.add(GoodWorker(tag='"t"'))
        await bench.until(lambda: bench.readings().round >= 2)
        (reading,) = bench.readings().by_uid.values()
        assert reading.report is not None
        assert (reading.report.clock_seconds, reading.tag) == (77.5, '"t"')


async def test_every_kind_of_failure_is_named_and_counted() -> None:
    async with bench_of(deadline=0.3) as bench:
        stranger = GoodWorker(tokens={"another"})
        await bench.add(GoodWorker(), hanging, dripping, garbage, stranger, GoodWorker(fields={"drafts": 1}))
        await bench.rounds(1)
        good, silent, drip, noise, refused, invalid = bench.problems()
        assert good is None
        assert str(silent).endswith("no complete answer within 0.3 s")
        assert str(drip).endswith("no complete answer within 0.3 s")
        assert "Bad status line" in str(noise) or "Expected HTTP" in str(noise)
        assert "answered 401 to each of 1 admin tokens" in str(refused)
        assert str(invalid).startswith("boot_id")
        assert {"timeout", "unreachable", "unauthorized", "bad_report"} <= bench.scraper.counters.reports_failed.keys()
        assert bench.unauthorized[0] == KEY


async def test_pods_that_leave_or_have_no_address_are_not_asked() -> None:
    async with bench_of() as bench:
        leaving, starting, gone = GoodWorker(), GoodWorker(), GoodWorker()
        targets = await bench.add(leaving, starting, gone)
        changed = [replace(targets[0], leaving=True), replace(targets[1], address=None)]
        bench.targets[KEY] = [*changed, targets[2]]
        await bench.rounds(1)
        assert bench.readings().by_uid.keys() == {targets[2].uid}
        bench.targets[KEY] = changed
        await bench.rounds(2)
        assert bench.readings().by_uid == {}
        assert leaving.asked + starting.asked == []


async def test_a_deleted_deployment_is_polled_no_more() -> None:
    async with bench_of() as bench:
        worker = GoodWorker()
        await bench.add(worker)
        await bench.rounds(1)
        bench.table.remove(KEY)
        await asyncio.sleep(1)
        asked = len(worker.asked)
        await asyncio.sleep(3 * PERIOD_SECONDS)
        assert len(worker.asked) == asked


async def test_the_loop_can_be_started_again() -> None:
    """A replica that loses the leadership may get it back."""
    async with socket_workers() as workers:
        client = WorkerClient()
        again = Bench(workers, client)
        for _ in range(2):
            running = asyncio.create_task(again.scraper.run())
            await again.add(GoodWorker())
            await again.rounds(2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            before = again.readings().round
            await asyncio.sleep(2 * PERIOD_SECONDS)
            assert again.readings().round == before
        await client.close()


async def test_a_nudge_starts_a_round_at_once() -> None:
    async with bench_of(period=30.0) as bench:
        await bench.add(GoodWorker())
        await asyncio.sleep(1)
        assert bench.readings().round == 0
        began = time.monotonic()
        bench.scraper.nudge(KEY)
        await bench.rounds(1)
        assert time.monotonic() - began < 0.5
        bench.scraper.nudge(("ns", "unknown"))


async def test_nudges_without_end_leave_a_gap_between_rounds() -> None:
    async with bench_of(period=30.0) as bench:
        await bench.add(GoodWorker())
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            bench.scraper.nudge(KEY)
            await asyncio.sleep(0.01)
        assert 2 <= bench.readings().round <= 6


# --- errors of the operator itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OperatorError("no tokens"), RuntimeError("a bug")])
async def test_the_loop_survives_errors_of_a_round(error: Exception) -> None:
    async with bench_of() as bench:
        await bench.add(GoodWorker())
        await bench.add(GoodWorker(), key=("ns", "other"))
        bench.notify_error = error
        await bench.until(lambda: bench.scraper.counters.rounds_failed >= 2)
        bench.notify_error = None
        await bench.until(lambda: {KEY, ("ns", "other")} <= set(bench.notified))


async def test_missing_pods_of_one_deployment_do_not_stop_another() -> None:
    async with bench_of() as bench:
        await bench.add(GoodWorker())
        await bench.add(GoodWorker(), key=("ns", "broken"))
        del bench.targets[("ns", "broken")]
        await bench.rounds(3)
        assert bench.scraper.counters.rounds_failed >= 2


# --- plans ------------------------------------------------------------------------------------------------------------


def publish(bench: Bench, version: int, **fields: Any) -> None:
    plan = Plan(uid="u", version=version)
    bench.table.update(KEY, published=Published(uid="u", version=version, plan=Packed.of(plan), **fields))


def versions(worker: GoodWorker) -> list[int]:
    return [plan.version for plan in worker.plans]


async def test_published_plans_are_pushed_once() -> None:
    async with bench_of() as bench:
        first, second = GoodWorker(), GoodWorker()
        await bench.add(first, second)
        await bench.rounds(2)
        assert versions(first) == []
        publish(bench, 3)
        await bench.rounds(3)
        publish(bench, 4)
        bench.scraper.nudge(KEY)
        await bench.rounds(3)
        assert (versions(first), versions(second)) == ([3, 4], [3, 4])
        assert bench.scraper.counters.pushes == 4


async def test_an_excluded_worker_gets_its_own_plan() -> None:
    async with bench_of() as bench:
        common, quiet = GoodWorker(), GoodWorker()
        _, target = await bench.add(common, quiet)
        own = {str(target.address): Packed.of(Plan(uid="u", version=3, quiet=True))}
        publish(bench, 3, own=own, excluded=frozenset(own))
        await bench.rounds(3)
        assert [plan.quiet for plan in common.plans] == [False]
        assert [plan.quiet for plan in quiet.plans] == [True]


async def test_a_failed_push_waits_for_the_next_round() -> None:
    async with bench_of() as bench:
        worker = GoodWorker(push_status=409)
        await bench.add(worker)
        publish(bench, 3)
        await bench.rounds(3)
        counters = bench.scraper.counters
        assert abs(worker.requests.count("PUT") - worker.requests.count("GET")) <= 1
        assert counters.pushes_failed["refused"] >= 2
        worker.push_status = 200
        await bench.until(lambda: counters.pushes == 1)


async def test_a_worker_that_does_not_answer_delays_no_readings_and_no_other_push() -> None:
    async with bench_of(deadline=0.3) as bench:
        worker = GoodWorker()
        await bench.add(hanging, worker)
        publish(bench, 3)
        await bench.rounds(2)
        assert versions(worker) == [3]


async def test_no_plan_is_pushed_to_a_paused_deployment() -> None:
    async with bench_of() as bench:
        worker = GoodWorker()
        await bench.add(worker)
        bench.table.update(KEY, resource=Packed.of(resource_of(KEY, **{PAUSED_ANNOTATION: "true"})))
        publish(bench, 3)
        await bench.rounds(3)
        assert versions(worker) == []


async def test_no_plan_is_pushed_when_the_guard_raises() -> None:
    async with bench_of() as bench:
        worker = GoodWorker()
        await bench.add(worker)

        def refuse() -> None:
            raise OperatorError("not the leader")

        bench.guard = refuse
        publish(bench, 3)
        await bench.rounds(3)
        assert versions(worker) == []
        assert bench.scraper.counters.rounds_failed >= 2


# --- hanging workers --------------------------------------------------------------------------------------------------


async def test_workers_that_hang_are_asked_less_often_until_they_are_ready_again() -> None:
    async with bench_of(deadline=0.1) as bench:
        asked = 0

        async def counting(*args: Any) -> None:
            nonlocal asked
            asked += 1
            await hanging(*args)

        (target,) = await bench.add(counting)
        await bench.rounds(12)
        assert 3 <= asked <= 6, "1, 2, 4 and 8 periods apart"
        assert bench.problems() != [None]
        bench.targets[KEY] = [replace(target, ready=False)]
        await bench.rounds(1)
        before = asked
        bench.targets[KEY] = [target]
        await bench.rounds(2)
        assert asked > before


async def test_workers_that_were_not_asked_in_time_go_first_in_the_next_round() -> None:
    """Twelve workers that need 0.3 s each, two calls at a time and 0.5 s per round: all of them get their turn."""
    async with bench_of(deadline=0.4, limits=ScrapeLimits(total=2, per_deployment=2)) as bench:
        believed: set[str] = set()

        async def slow(*args: Any) -> None:
            await asyncio.sleep(0.3)
            await GoodWorker()(*args)

        await bench.add(*[slow] * 12)
        await bench.rounds(1)
        assert bench.problems().count(NOT_ASKED) >= 8
        for _ in range(12):
            believed |= {uid for uid, reading in bench.readings().by_uid.items() if reading.report is not None}
            await bench.rounds(1)
        assert len(believed) == 12
        assert bench.scraper.counters.reports_failed["not_asked"] > 0


async def test_workers_that_hang_take_no_slots_from_others() -> None:
    """The hanging workers of one deployment want more slots than there are."""
    async with bench_of(deadline=3.0, limits=ScrapeLimits(total=4, per_deployment=4)) as bench:
        other = ("ns", "other")
        await bench.add(*[hanging] * 4)
        await bench.add(GoodWorker(), GoodWorker(), key=other)
        await bench.rounds(1)
        bench.times.clear()
        await asyncio.sleep(5)
        assert max(times.duration for times in bench.times[other]) < 1


async def test_a_round_ends_with_its_budget() -> None:
    async with bench_of(deadline=0.4, limits=ScrapeLimits(total=2, per_deployment=2)) as bench:
        await bench.add(*[hanging] * 12)
        await bench.rounds(4)
        assert all(times.duration < 0.4 + 0.1 + 0.3 for times in bench.times[KEY])


async def test_one_deployment_with_hanging_workers_delays_no_other() -> None:
    """50 deployments, one of which has 40 workers that hang: the rounds of the others keep their period.

    The total limit is below the demand of the hanging workers, so that they would take all slots without the share.
    """
    async with bench_of(period=1.0, deadline=2.0, limits=ScrapeLimits(total=20, per_deployment=16)) as bench:
        stalled = ("ns", "stalled")
        others = [("ns", f"good-{number}") for number in range(49)]
        await bench.add(*[hanging] * 40, key=stalled)
        for key in others:
            await bench.add(GoodWorker(), key=key)
        await asyncio.sleep(8)
        lateness = sorted(times.lateness for key in others for times in bench.times[key])
        assert len(lateness) > 49 * 5
        assert lateness[int(0.99 * len(lateness))] < 0.5
        assert all(times.duration < 1 for key in others for times in bench.times[key])
        assert all(bench.problems(key) == [None] for key in others)
        assert len(bench.times[stalled]) >= 2


# --- schedule ---------------------------------------------------------------------------------------------------------


def test_deployments_have_places_within_the_period() -> None:
    turns = [next_turn(("ns", f"d{number}"), 5.0, 1000.0) for number in range(1000)]
    assert all(1000 <= turn < 1005 for turn in turns)
    by_second = [sum(int(turn - 1000) == second for turn in turns) for second in range(5)]
    assert min(by_second) > 150
    assert next_turn(KEY, 5.0, next_turn(KEY, 5.0, 1000.0) + 0.001) == pytest.approx(next_turn(KEY, 5.0, 1000.0) + 5)
