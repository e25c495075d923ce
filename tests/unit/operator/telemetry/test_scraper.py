"""Telemetry loop over real sockets: readings, pushes of plans, and errors of the operator itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.errors import OperatorError
from specdecode_operator.state.deployment_state import Published
from specdecode_operator.state.packed import Packed
from specdecode_operator.telemetry.scraper import next_turn
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_worker.contract import Plan
from support.operators.scraper_bench import KEY, PERIOD_SECONDS, Bench, bench_of, resource_of
from support.operators.socket_workers import GoodWorker, Request, dripping, garbage, hanging, socket_workers

pytestmark = pytest.mark.slow

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
        assert "delete it" in str(refused), "the condition says what to do"
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


async def test_nudges_without_end_leave_a_gap_between_pushes() -> None:
    async with bench_of(period=30.0) as bench:
        worker = GoodWorker()
        await bench.add(worker)
        ends = time.monotonic() + 1.5
        version = 0
        while time.monotonic() < ends:
            publish(bench, version := version + 1)
            bench.scraper.nudge(KEY)
            await asyncio.sleep(0.01)
        assert 2 <= len(worker.plans) <= 7


async def test_a_nudge_after_a_round_pushes_without_reading_reports_again() -> None:
    async with bench_of(period=3600.0) as bench:
        worker, silent = GoodWorker(), GoodWorker(tokens={"other"})
        await bench.add(worker, silent)
        await asyncio.sleep(1)
        bench.scraper.nudge(KEY)
        await bench.rounds(1)
        publish(bench, 3)
        bench.scraper.nudge(KEY)
        await bench.until(lambda: bool(worker.plans))
        assert worker.requests == ["GET", "PUT"]
        assert len(silent.asked) == 1, "no report says which plan this worker runs"
        assert bench.readings().round == 1


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
        bench.table.update(KEY, resource=Packed.of(resource_of(KEY, paused=True)))
        publish(bench, 3)
        await bench.rounds(3)
        assert versions(worker) == []


async def test_no_plan_is_pushed_when_the_guard_raises() -> None:
    async with bench_of() as bench:
        worker = GoodWorker()
        await bench.add(worker)

        def refuse() -> float | None:
            raise OperatorError("not the leader")

        bench.guard = refuse
        publish(bench, 3)
        await bench.rounds(3)
        assert versions(worker) == []
        assert bench.scraper.counters.rounds_failed >= 2


async def test_a_push_ends_when_another_process_may_lead() -> None:
    class Stuck(GoodWorker):
        async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
            if request.method == "PUT":
                await hanging(request, writer)
            await super().__call__(request, writer)

    async with bench_of(deadline=20) as bench:
        await bench.add(Stuck())
        bench.guard = lambda: 0.2
        publish(bench, 3)
        async with asyncio.timeout(5):
            await bench.until(lambda: bench.scraper.counters.pushes_failed["not_asked"] > 0)


# --- schedule ---------------------------------------------------------------------------------------------------------


def test_deployments_have_places_within_the_period() -> None:
    turns = [next_turn(("ns", f"d{number}"), 5.0, 1000.0) for number in range(1000)]
    assert all(1000 <= turn < 1005 for turn in turns)
    by_second = [sum(int(turn - 1000) == second for turn in turns) for second in range(5)]
    assert min(by_second) > 150
    assert next_turn(KEY, 5.0, next_turn(KEY, 5.0, 1000.0) + 0.001) == pytest.approx(next_turn(KEY, 5.0, 1000.0) + 5)
