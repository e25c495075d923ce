"""Client of the admin ports over real sockets: one deadline per call, tokens in order, https."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specdecode_operator.errors import BadReport, Unauthorized, WorkerError, WorkerTimeout, WorkerUnreachable
from specdecode_operator.telemetry.polling import Reading, Unchanged, WorkerClient
from specdecode_worker.contract import MAX_REPORT_BYTES, Header, Plan
from support.certificates import certified_server
from support.operators.socket_workers import (
    Behaviour,
    GoodWorker,
    Request,
    SocketWorkers,
    answer,
    dripping,
    garbage,
    good_report,
    hanging,
    socket_workers,
)

DEADLINE_SECONDS = 0.5


@pytest.fixture
async def workers() -> AsyncIterator[SocketWorkers]:
    async with socket_workers() as started:
        yield started


@pytest.fixture
async def client() -> AsyncIterator[WorkerClient]:
    client = WorkerClient(timeout_seconds=60)
    yield client
    await client.close()


@pytest.fixture
async def hasty_client() -> AsyncIterator[WorkerClient]:
    client = WorkerClient(timeout_seconds=DEADLINE_SECONDS)
    yield client
    await client.close()


def answering(status: int, body: bytes = b"", **headers: str) -> Behaviour:
    async def behaviour(request: Request, writer: asyncio.StreamWriter) -> None:
        answer(writer, status, body, **headers)

    return behaviour


# --- deadline ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", [hanging, dripping])
async def test_a_slow_worker_ends_at_the_deadline(
    workers: SocketWorkers, hasty_client: WorkerClient, behaviour: Behaviour
) -> None:
    address = await workers.add(behaviour)
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no complete answer within 0\.5 s"):
        await hasty_client.report(address, ("secret",))
    assert DEADLINE_SECONDS <= time.monotonic() - started < DEADLINE_SECONDS + 0.4


async def test_the_deadline_bounds_all_tokens_together(workers: SocketWorkers, hasty_client: WorkerClient) -> None:
    async def slow_refusal(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        answer(writer, 401)

    address = await workers.add(slow_refusal)
    with pytest.raises(WorkerTimeout):
        await hasty_client.report(address, ("a", "b", "c"))


async def test_calls_do_not_wait_for_calls_that_hang(workers: SocketWorkers, client: WorkerClient) -> None:
    """The connector of the HTTP library would otherwise open a hundred connections at most."""
    silent, working = await workers.add(hanging), await workers.add(GoodWorker())
    calls = [asyncio.create_task(client.report(silent, "secret")) for _ in range(120)]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await client.report(working, "secret")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_closed_port_and_garbage_are_unreachable(workers: SocketWorkers, client: WorkerClient) -> None:
    for address in ("127.0.0.1", await workers.add(garbage)):
        with pytest.raises(WorkerUnreachable):
            await client.report(address, "secret")


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_a_report_without_end_is_cut_off(workers: SocketWorkers, client: WorkerClient) -> None:
    address = await workers.add(answering(200, b"x" * (MAX_REPORT_BYTES * 20)))
    with pytest.raises(BadReport, match=str(MAX_REPORT_BYTES)):
        await client.report(address, "secret")


async def test_a_redirect_is_not_followed(workers: SocketWorkers, client: WorkerClient) -> None:
    target = GoodWorker()
    location = f"http://{await workers.add(target)}:8001/v1/report"
    address = await workers.add(answering(307, Location=location))
    with pytest.raises(WorkerError, match="answered 307"):
        await client.report(address, "secret")
    assert target.asked == []


async def test_an_unchanged_report_is_not_sent_again(workers: SocketWorkers, client: WorkerClient) -> None:
    address = await workers.add(GoodWorker(tag='"t"'))
    first = await client.report(address, "secret")
    assert isinstance(first, Reading)
    assert first.tag == '"t"'
    assert isinstance(await client.report(address, "secret", '"older"'), Reading)
    assert await client.report(address, "secret", first.tag) == Unchanged(77.5)


@pytest.mark.parametrize("clock", ["", "soon", "nan", "-1", "inf"])
async def test_an_unchanged_report_needs_a_clock(workers: SocketWorkers, client: WorkerClient, clock: str) -> None:
    address = await workers.add(answering(304, **{Header.clock_seconds: clock}))
    with pytest.raises(BadReport, match=Header.clock_seconds):
        await client.report(address, "secret", '"t"')


async def test_a_304_without_a_known_tag_is_not_a_report(workers: SocketWorkers, client: WorkerClient) -> None:
    address = await workers.add(answering(304))
    with pytest.raises(BadReport):
        await client.report(address, "secret")


async def test_a_refused_plan_has_the_reason_of_the_worker(workers: SocketWorkers, client: WorkerClient) -> None:
    address = await workers.add(answering(409, json.dumps({"error": {"message": "another uid"}}).encode()))
    with pytest.raises(WorkerError, match="another uid"):
        await client.push(address, "secret", Plan())


# --- tokens -----------------------------------------------------------------------------------------------------------


async def test_the_next_token_is_tried_after_a_401_and_remembered(workers: SocketWorkers, client: WorkerClient) -> None:
    worker = GoodWorker(tokens={"previous"})
    address = await workers.add(worker)
    for _ in range(2):
        await client.report(address, ("current", "previous"))
    assert worker.asked == ["current", "previous", "previous"]
    client.forget(address)
    await client.report(address, ("current", "previous"))
    assert worker.asked[3:] == ["current", "previous"]


async def test_the_current_token_is_first_again_when_the_worker_has_reloaded(
    workers: SocketWorkers, client: WorkerClient
) -> None:
    worker = GoodWorker(tokens={"previous"})
    address = await workers.add(worker)
    await client.report(address, ("current", "previous"))
    worker.tokens = {"current"}
    for _ in range(2):
        await client.report(address, ("current", "previous"))
    assert worker.asked[2:] == ["previous", "current", "current"]


@pytest.mark.parametrize("status", [403, 500, 503])
async def test_other_statuses_do_not_try_the_next_token(
    workers: SocketWorkers, client: WorkerClient, status: int
) -> None:
    asked: list[str] = []

    async def behaviour(request: Request, writer: asyncio.StreamWriter) -> None:
        asked.append(request.token)
        answer(writer, status)

    address = await workers.add(behaviour)
    with pytest.raises(WorkerError, match=str(status)):
        await client.report(address, ("current", "previous"))
    assert asked == ["current"]


@pytest.mark.parametrize("tokens", [(), ("a",), ("a", "b")])
async def test_no_accepted_token_is_unauthorized(
    workers: SocketWorkers, client: WorkerClient, tokens: tuple[str, ...]
) -> None:
    address = await workers.add(GoodWorker())
    with pytest.raises(Unauthorized, match=f"{len(tokens)} admin tokens"):
        await client.report(address, tokens)


# --- https ------------------------------------------------------------------------------------------------------------


async def test_https_verifies_the_signature_but_not_the_address(workers: SocketWorkers, tmp_path: Path) -> None:
    ca_file, context = certified_server(tmp_path, "ours")
    _, foreign = certified_server(tmp_path, "foreign")
    plan_taker = GoodWorker(fields=good_report())
    address, impostor = await workers.add(plan_taker, tls=context), await workers.add(GoodWorker(), tls=foreign)
    client = WorkerClient(ca_file=ca_file, timeout_seconds=60)
    try:
        assert isinstance(await client.report(address, "secret", tls=True), Reading)
        await client.push(address, "secret", Plan(version=3), tls=True)
        assert [plan.version for plan in plan_taker.plans] == [3]
        with pytest.raises(WorkerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await client.report(impostor, "secret", tls=True)
    finally:
        await client.close()


async def test_a_changed_ca_file_is_read_again(workers: SocketWorkers, tmp_path: Path) -> None:
    before, _ = certified_server(tmp_path, "before")
    after, context = certified_server(tmp_path, "after")
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(before.read_bytes())
    address = await workers.add(GoodWorker(), tls=context)
    client = WorkerClient(ca_file=ca_file, timeout_seconds=60)
    try:
        with pytest.raises(WorkerUnreachable):
            await client.report(address, "secret", tls=True)
        ca_file.write_bytes(after.read_bytes())
        assert isinstance(await client.report(address, "secret", tls=True), Reading)
        ca_file.unlink()
        with pytest.raises(WorkerUnreachable, match=r"ca\.crt"):
            await client.report(address, "secret", tls=True)
    finally:
        await client.close()
