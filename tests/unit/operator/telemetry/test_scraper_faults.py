"""Telemetry loop over real sockets: workers that hang delay neither other deployments nor other workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from specdecode_operator.telemetry.scrape_round import ScrapeLimits
from specdecode_operator.telemetry.worker_poll import NOT_ASKED
from support.operators.scraper_bench import KEY, bench_of
from support.operators.socket_workers import GoodWorker, hanging

pytestmark = pytest.mark.slow


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


async def test_calls_have_tasks_only_while_they_have_slots() -> None:
    """A thousand deployments that are late would otherwise have ten thousand of them."""
    most = 0

    async def counting(*args: Any) -> None:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await GoodWorker()(*args)

    async with bench_of(limits=ScrapeLimits(total=2, per_deployment=2)) as bench:
        await bench.add(*[counting] * 60)
        await bench.rounds(1)
        assert bench.problems() == [None] * 60
    assert 2 < most < 30


async def test_workers_that_hang_take_no_slots_from_others() -> None:
    """The hanging workers of one deployment want more slots than there are."""
    async with bench_of(deadline=3.0, limits=ScrapeLimits(total=4, per_deployment=4)) as bench:
        other = ("ns", "other")
        await bench.add(*[hanging] * 4)
        await bench.add(GoodWorker(), GoodWorker(), key=other)
        await bench.rounds(1)
        bench.times.clear()
        await asyncio.sleep(5)
        assert median(times.duration for times in bench.times[other]) < 1


async def test_a_round_ends_with_its_budget() -> None:
    async with bench_of(deadline=0.4, limits=ScrapeLimits(total=2, per_deployment=2)) as bench:
        await bench.add(*[hanging] * 12)
        await bench.rounds(4)
        assert all(times.duration < 1.6 for times in bench.times[KEY]), "six deadlines, one after the other, are 2.4 s"


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
        assert lateness[int(0.9 * len(lateness))] < 0.5
        durations = [times.duration for key in others for times in bench.times[key]]
        assert median(durations) < 1
        assert all(bench.problems(key) == [None] for key in others)
        assert len(bench.times[stalled]) >= 2
