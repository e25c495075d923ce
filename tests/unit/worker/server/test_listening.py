"""Ports, their connections with deadlines, the life cycle of a worker and its shutdown, and its vital parts."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
from fastapi import FastAPI

from specdecode_worker.contract import EngineConfig, ModelConfig, ServerConfig, WorkerConfig
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.server.listening import (
    MAX_PIPELINED,
    BoundedHttpProtocol,
    ConnectionState,
    ConnectionTable,
    Cut,
    GracefulShutdown,
    Lifecycle,
    LifecycleState,
    Listener,
    VitalParts,
    listening,
)

LIMITS = ServerConfig(header_timeout_seconds=10 / 0.95, body_timeout_seconds=30 / 0.95, write_timeout_seconds=20)
"""Limits of 10 s for headers and 30 s for bodies: these timeouts end a twentieth early."""


def overdue(state: ConnectionState, now: float) -> Cut | None:
    return state.overdue(now, LIMITS)


@pytest.fixture
def state() -> ConnectionState:
    """Return a connection accepted at time 0."""
    return ConnectionState(now=0)


@pytest.fixture
def answering(state: ConnectionState) -> ConnectionState:
    """Return a connection whose request is whole at time 1."""
    state.begin_request(1)
    state.has_headers = True
    state.complete_request(1, answered=False)
    return state


def test_silent_connection_has_the_time_of_headers(state: ConnectionState) -> None:
    assert overdue(state, 10) is None
    assert overdue(state, 10.1) is Cut.HEADERS_LATE


def test_first_byte_does_not_extend_the_deadline(state: ConnectionState) -> None:
    state.begin_request(9)
    assert overdue(state, 10.1) is Cut.HEADERS_LATE
    state.has_headers = True
    assert overdue(state, 30) is None
    assert overdue(state, 30.1) is Cut.BODY_LATE


def test_idle_connection_is_closed_and_a_new_request_has_its_own_deadline(answering: ConnectionState) -> None:
    answering.complete_response(100)
    assert overdue(answering, 175) is None
    assert overdue(answering, 175.1) is Cut.IDLE
    answering.begin_request(170)
    assert overdue(answering, 180) is None
    assert overdue(answering, 180.1) is Cut.HEADERS_LATE


def test_response_before_the_end_of_the_request_keeps_the_deadline(state: ConnectionState) -> None:
    state.begin_request(0)
    state.has_headers = True
    state.complete_response(1)
    assert overdue(state, 30.1) is Cut.BODY_LATE
    state.complete_request(2, answered=True)
    assert overdue(state, 70) is None
    assert overdue(state, 77.1) is Cut.IDLE


def test_output_above_the_high_water_mark_must_be_read_in_time(answering: ConnectionState) -> None:
    answering.pause_writing(5)
    for now in range(5, 25):
        answering.observe_unsent(70_000 - now, now)  # a byte a second is no progress
        assert overdue(answering, now) is None
    assert overdue(answering, 25.1) is Cut.UNREAD
    answering.resume_writing(25)
    assert overdue(answering, 45) is None


def test_small_unsent_output_may_stay_while_it_shrinks(answering: ConnectionState) -> None:
    for now, size in ((2, 500), (20, 700), (21, 600), (40, 900)):
        answering.observe_unsent(size, now)
        assert overdue(answering, now) is None
    assert overdue(answering, 41.1) is Cut.UNREAD
    answering.observe_unsent(0, 42)
    assert overdue(answering, 1000) is None


def test_rest_of_a_complete_response_must_be_read_whole(answering: ConnectionState) -> None:
    answering.observe_unsent(500, 2)
    answering.complete_response(10)
    for now in range(11, 30):
        answering.observe_unsent(500 - now, now)
        assert overdue(answering, now) is None
    assert overdue(answering, 30.1) is Cut.UNREAD


def test_headers_and_framing_are_bounded(state: ConnectionState) -> None:
    state.begin_request(0)
    state.received_bytes = 64 * 1024
    assert not state.has_too_much_framing
    state.received_bytes += 1
    assert state.has_too_much_framing
    state.begin_request(1)
    state.received_bytes, state.body_bytes = 600_000, 100_000  # chunks of one byte
    assert not state.has_too_much_framing
    state.received_bytes += 400_000
    assert state.has_too_much_framing
    state.complete_request(2, answered=False)
    assert not state.has_too_much_framing


class FakeConnection:
    """Connection that records why it was closed."""

    def __init__(self, now: float, *, serving: bool = False) -> None:
        self.state = ConnectionState(now)
        if serving:
            self.state.begin_request(now)
            self.state.complete_request(now, answered=False)
        self.reason: Cut | None = None
        self.unsent = 0

    def unsent_bytes(self) -> int:
        return self.unsent

    def cut(self, reason: Cut) -> None:
        self.reason = reason


def test_sweep_closes_overdue_connections() -> None:
    table = ConnectionTable("public", LIMITS, 10)
    old, new = FakeConnection(0), FakeConnection(5)
    assert table.add(old)
    assert table.add(new)
    table.sweep(10)
    assert old.reason is None
    table.sweep(10.1)
    assert (old.reason, new.reason) == (Cut.HEADERS_LATE, None)


def test_sweep_closes_connections_that_do_not_read() -> None:
    table = ConnectionTable("public", LIMITS, 10)
    deaf = FakeConnection(0, serving=True)
    deaf.unsent = 100
    table.add(deaf)
    for now in range(21):
        table.sweep(now)
    assert deaf.reason is None
    table.sweep(20.1)
    assert deaf.reason is Cut.UNREAD


def test_connection_without_a_request_makes_place_at_the_bound() -> None:
    table = ConnectionTable("public", LIMITS, 2)
    served, half_open, new = FakeConnection(0, serving=True), FakeConnection(1), FakeConnection(2)
    assert table.add(served)
    assert table.add(half_open)
    assert table.add(new)
    assert (served.reason, half_open.reason, len(table)) == (None, Cut.DISPLACED, 2)


def test_connection_is_refused_while_all_are_served() -> None:
    table = ConnectionTable("public", LIMITS, 1)
    served = FakeConnection(0, serving=True)
    table.add(served)
    assert not table.add(FakeConnection(1))
    table.remove(served)
    assert table.add(FakeConnection(2))


async def test_connection_with_too_many_pipelined_requests_is_closed() -> None:
    table = ConnectionTable("public", ServerConfig(), 10)
    listener = Listener(FastAPI(), table, 1.0, None)
    connection = BoundedHttpProtocol(table, listener.config, listener.server_state, {})
    transport = Mock(asyncio.Transport)
    transport.get_extra_info.return_value = None
    transport.is_closing.side_effect = lambda: transport.abort.called
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n" * (1 + MAX_PIPELINED))
    assert (len(connection.pipeline), transport.abort.called) == (MAX_PIPELINED, False)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n" * 500)
    assert (len(connection.pipeline), transport.abort.called) == (MAX_PIPELINED, True)
    transport.write.assert_not_called()


async def test_every_stream_of_the_routers_has_a_connection() -> None:
    streams, running, all_run = 300, 0, asyncio.Event()
    admin = FastAPI()

    @admin.get("/stream")
    async def stream() -> str:
        nonlocal running
        running += 1
        if running == streams:
            all_run.set()
        await all_run.wait()
        return "the end"

    async def answer(address: tuple[str, int]) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = await reader.read()
        writer.close()
        return received

    config = WorkerConfig(
        model=ModelConfig(uri="file:///m", served_name="m"), engine=EngineConfig(max_num_seqs=streams)
    )
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=streams) for _ in range(2)]
    async with listening((FastAPI(), admin), sockets, config, None, VitalParts()), asyncio.timeout(20):
        answers = await asyncio.gather(*(answer(sockets[1].getsockname()) for _ in range(streams)))
    assert all(one.startswith(b"HTTP/1.1 200 ") for one in answers)


def at(state: LifecycleState) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


@pytest.mark.parametrize(
    ("state", "healthy", "ready", "shutting_down", "refusal"),
    [
        (LifecycleState.LOADING, True, False, False, "loading"),
        (LifecycleState.SERVING, True, True, False, None),
        (LifecycleState.LEAVING, True, False, True, None),
        (LifecycleState.DRAINING, True, False, True, "draining"),
        (LifecycleState.FAILED, False, False, False, "engine_gone"),
    ],
)
def test_probes_and_refusals_per_state(
    state: LifecycleState, healthy: bool, ready: bool, shutting_down: bool, refusal: str | None
) -> None:
    lifecycle = at(state)
    assert (lifecycle.healthy, lifecycle.ready, lifecycle.shutting_down) == (healthy, ready, shutting_down)
    if refusal is None:
        lifecycle.check_accepting()
    else:
        with pytest.raises(Unavailable) as refused:
            lifecycle.check_accepting()
        assert refused.value.error_code == refusal


def test_state_never_moves_backwards() -> None:
    lifecycle = at(LifecycleState.LEAVING)
    lifecycle.serve()
    assert lifecycle.state is LifecycleState.LEAVING
    lifecycle.fail("first")
    lifecycle.fail("second")
    lifecycle.drain()
    assert (lifecycle.state, lifecycle.failure) == (LifecycleState.FAILED, "first")


def test_suspicion_makes_a_serving_worker_unready_for_a_while() -> None:
    lifecycle = at(LifecycleState.SERVING)
    lifecycle.suspicion = "no progress for 31 s"
    assert (lifecycle.ready, lifecycle.healthy) == (False, True)
    assert lifecycle.readiness == "serving, but the engine makes no progress for 31 s"
    lifecycle.check_accepting()
    lifecycle.suspicion = ""
    assert (lifecycle.ready, lifecycle.readiness) == (True, "serving")


def shutdown(
    lifecycle: Lifecycle, running: list[int], delay: float, grace: float, exit_now: asyncio.Event | None = None
) -> GracefulShutdown:
    config = ServerConfig(endpoint_delay_seconds=delay, grace_period_seconds=grace)
    return GracefulShutdown(lifecycle, config, lambda: running[0], exit_now or asyncio.Event())


async def test_shutdown_is_unready_at_once_and_refuses_after_the_delay() -> None:
    lifecycle = at(LifecycleState.SERVING)
    shutting_down = shutdown(lifecycle, [0], delay=0.2, grace=5)
    drained = shutting_down.begin()
    assert not lifecycle.ready
    assert shutting_down.begin() is drained
    await asyncio.sleep(0.05)
    lifecycle.check_accepting()
    assert await drained == 0
    assert lifecycle.state is LifecycleState.DRAINING


@pytest.mark.parametrize("exit_now", [True, False])
async def test_shutdown_ends_after_the_grace_period_or_a_second_signal(exit_now: bool) -> None:
    exit_event = asyncio.Event()
    drained = shutdown(at(LifecycleState.SERVING), [2], 0.1, 60 if exit_now else 0.2, exit_event).begin()
    began = time.monotonic()
    if exit_now:
        exit_event.set()
    assert await drained == 2
    assert time.monotonic() - began < 5


async def test_the_grace_period_begins_after_the_endpoint_delay() -> None:
    lifecycle, began = at(LifecycleState.SERVING), time.monotonic()
    drained = shutdown(lifecycle, [1], delay=0.4, grace=0.2).begin()
    await asyncio.sleep(0.3)
    assert lifecycle.state is LifecycleState.LEAVING, "new requests are still served"
    assert await drained == 1
    assert 0.55 < time.monotonic() - began < 5


PROGRAM = """
import sys, threading, time
from specdecode_worker.server.listening import ExitDeadline

print("imported", flush=True)
deadline = ExitDeadline()
deadline.set(0.5)
deadline.set(30)
deadline.code = 3
threading.Thread(target=time.sleep, args=(float(sys.argv[1]),)).start()
sys.exit(4)
"""


@pytest.mark.parametrize(("busy_seconds", "code"), [(20, 3), (0, 4)])
def test_a_busy_thread_does_not_hold_the_process(busy_seconds: float, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(busy_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        assert process.wait(60) == code
        assert time.monotonic() - began < 15


async def _fail(reason: str) -> None:
    raise RuntimeError(reason)


async def test_the_first_failure_is_the_reason() -> None:
    parts = VitalParts()
    parts.start("first part", _fail("it broke"))
    parts.start("second part", _fail("it broke too"))
    assert await asyncio.wait_for(parts.failed, 5) == "the first part failed: RuntimeError: it broke"
    await parts.stop()


async def test_a_regular_end_is_no_failure() -> None:
    parts = VitalParts()
    parts.start("short part", asyncio.sleep(0))
    parts.start("long part", asyncio.sleep(60))
    await asyncio.sleep(0.05)
    await parts.stop()
    assert not parts.failed.done()
