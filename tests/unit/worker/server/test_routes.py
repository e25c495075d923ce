"""Parts of the routes: error texts without paths, the load that routers read, and calls that several callers share."""

from __future__ import annotations

import asyncio

import pytest

from specdecode_worker.contract import DraftState, Report, StepCell, TaskMatch
from specdecode_worker.contract.internal_stream import (
    PlanTask,
    StepKindTime,
    WorkerLoad,
    decode_document,
    encode_document,
)
from specdecode_worker.server.errors import BadRequest, EngineFailed, without_paths
from specdecode_worker.server.routes.internal import ROUTER_SECONDS, SETTLE_SECONDS, RouterTable, load_of
from specdecode_worker.server.service import SharedCall


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("FileNotFoundError: [Errno 2] No such file: '/models/llama/config.json'", "FileNotFoundError: [Errno 2] No "
         "such file: '[path]'"),
        ("file:///models/llama has no weights", "[path] has no weights"),
        ("cannot connect to ipc:///tmp/specdecode-1/engine", "cannot connect to [path]"),
        ('File "/usr/lib/python3/site.py", line 3', 'File "[path]", line 3'),
        ("the engine process ended with exit code -9", "the engine process ended with exit code -9"),
        ("12 tokens/s and/or 1/2", "12 tokens/s and/or 1/2"),
    ],
)  # fmt: skip
def test_paths_are_replaced(text: str, public: str) -> None:
    assert without_paths(text) == public


def test_errors_of_the_server_name_no_paths_and_those_of_clients_are_left_alone() -> None:
    assert EngineFailed("no /models/x").body()["error"]["message"] == "no [path]"
    assert BadRequest("no /v1/x").body()["error"]["message"] == "no /v1/x"


def test_routers_count_while_they_ask() -> None:
    routers = RouterTable()
    for name, now in (("b", 100.0), ("a", 101.0), ("", 101.0), ("b", 109.0)):
        routers.record(name, now)
    assert routers.names == ("a", "b")
    routers.record("b", 101.5 + ROUTER_SECONDS)
    assert routers.names == ("b",)


def test_a_new_worker_is_not_settled_until_every_router_has_had_the_time_to_ask() -> None:
    routers = RouterTable()
    routers.record("a", 100)
    assert not routers.settled
    routers.record("b", 100 + SETTLE_SECONDS)
    assert routers.settled


def test_a_load_has_what_routers_need_of_a_report() -> None:
    cell = StepCell(tokens_bucket=8, draft_passes=2, prefill=False, context_bucket=0, count=200, x=(), xx=(), xt=(),
                    t=1.5, tt=0, device_seconds=0, wall_seconds=0, clipped=0, emitted=0)  # fmt: skip
    report = Report(
        boot_id="b",
        worker="w",
        clock_seconds=1,
        max_num_seqs=7,
        compatibility_key="k",
        named_drafts=(DraftState(name="coder"), DraftState(name="broken", problem="no file")),
        steps=(cell,),
    )
    tasks = (
        TaskMatch(name="code", match="```", draft="coder"),
        TaskMatch(name="sql", draft="broken"),
        TaskMatch(name="chat"),
    )
    load = decode_document(WorkerLoad, encode_document(load_of(report, tasks, {"t": 3}, RouterTable())))
    assert (load.clients, load.max_num_seqs, load.compatibility_key, load.routers) == ({"t": 3}, 7, "k", ())
    assert load.tasks == (PlanTask("code", "```", "coder"), PlanTask("sql"), PlanTask("chat"))
    assert load.steps == (StepKindTime(8, 2, False, 0, 200, 1.5),)


class Counter:
    """Call that returns how often it was called; it fails from the call number ``fails_from`` on."""

    def __init__(self, fails_from: int = 100) -> None:
        self.calls = 0
        self._fails_from = fails_from

    async def __call__(self) -> int:
        self.calls += 1
        await asyncio.sleep(0.01)
        if self.calls >= self._fails_from:
            raise ValueError("planted")
        return self.calls


async def test_callers_at_the_same_time_share_one_call() -> None:
    counter = Counter()
    shared = SharedCall(counter, interval_seconds=0.05)
    assert await asyncio.gather(*(shared.result() for _ in range(10))) == [1] * 10


async def test_caller_during_a_call_gets_the_next_one() -> None:
    counter = Counter()
    shared = SharedCall(counter, interval_seconds=0.05)
    first = asyncio.create_task(shared.result())
    await asyncio.sleep(0.005)
    assert counter.calls == 1
    assert (await shared.result(), await first) == (2, 1)


async def test_tight_loops_cause_one_call_per_interval() -> None:
    counter = Counter()
    shared = SharedCall(counter, interval_seconds=0.1)

    async def loop() -> None:
        while True:
            await shared.result()

    loops = [asyncio.create_task(loop()) for _ in range(4)]
    await asyncio.sleep(0.55)
    for one in loops:
        one.cancel()
    assert 2 <= counter.calls <= 6


async def test_error_reaches_every_caller_and_the_next_call_is_made() -> None:
    shared = SharedCall(Counter(fails_from=1), interval_seconds=0.01)
    results = await asyncio.gather(*(shared.result() for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in results] == ["planted"] * 3
    with pytest.raises(ValueError, match="planted"):
        await shared.result()


async def test_cancelled_caller_does_not_cancel_the_others() -> None:
    shared = SharedCall(Counter(), interval_seconds=0.01)
    first, second = asyncio.create_task(shared.result()), asyncio.create_task(shared.result())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1
