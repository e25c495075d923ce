"""Hostile clients of a router over a worker with the fake engine: each harms itself alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.faults import raw_clients
from support.faults.bounds import HALF_OPEN_SECONDS, SIGTERM_EXTRA_SECONDS, healthy, ttft_seconds, unaffected
from support.faults.workers import ADMIN_TOKEN, fake_worker
from support.worker_process import RouterProcess, running_router

WRITE_TIMEOUT_SECONDS = 4
MAX_CONNECTIONS = 400
MAX_BODY_BYTES = 4 * 1024 * 1024
FLAGS = ("--header-timeout-seconds=2", "--body-timeout-seconds=10", f"--write-timeout-seconds={WRITE_TIMEOUT_SECONDS}",
         f"--max-connections={MAX_CONNECTIONS}", "--grace-period-seconds=60")  # fmt: skip
LONG = {"model": "small", "prompt": "SAY:" + "x" * 240, "max_tokens": 240, "stream": True, "logprobs": 20, "n": 8}
"""Request with some megabytes of output."""
GARBAGE: dict[str, bytes] = {
    "random": os.urandom(100_000),
    "zeros": bytes(100_000),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    "method": b"G\x00T / HTTP/1.1\r\nHost: x\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    "long line": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: 1\r\n" * 100_000 + b"\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\nhello",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
}


@pytest.fixture(scope="module")
def router(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """Yield a router over one worker. A test must leave it idle and healthy."""
    folder = tmp_path_factory.mktemp("router")
    with (
        fake_worker(small_folder, folder / "log-worker") as worker,
        running_router([worker.admin], folder / "log", ADMIN_TOKEN, *FLAGS) as started,
    ):
        started.wait_until(lambda: 'workers{state="ready"} 1.0' in started.get("/metrics").text, 30)
        ttft_seconds(started, model="small")
        yield started
        started.wait_until(lambda: _running(started) == 0, 30)
        # aiohttp writes a traceback of its own for a request that it cannot parse; none may pass through our code.
        assert "/specdecode_router/" not in started.log


def test_half_open_requests_are_closed(router: RouterProcess) -> None:
    with contextlib.ExitStack() as stack, unaffected(router):
        half_open = {stack.enter_context(one): began for one, began in raw_clients.half_open_requests(router.public)}
        raw_clients.assert_closed(half_open, HALF_OPEN_SECONDS)


def test_huge_bodies_are_refused(router: RouterProcess) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(32 * MAX_BODY_BYTES // 65536):
            yield b"x" * 65536

    def post(content: bytes | Iterator[bytes]) -> int:
        with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            return httpx.post(f"{router.public}/v1/completions", content=content, timeout=60).status_code
        return 0  # the router closed the connection of a client that went on sending

    with unaffected(router), concurrent.futures.ThreadPoolExecutor(8) as clients:
        large = [clients.submit(post, b"x" * (MAX_BODY_BYTES + 1)) for _ in range(4)]
        larger = [clients.submit(post, endless()) for _ in range(4)]
        assert {one.result() for one in large} == {413}
        assert {one.result() for one in larger} <= {0, 408, 413}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(router: RouterProcess, name: str) -> None:
    with healthy(router):
        answers = [raw_clients.send(router.public, GARBAGE[name]) for _ in range(5)]
    assert all(not answer or answer.split()[1] == b"400" for answer in answers), answers[0][:300]
    assert all(answer.count(b"HTTP/1.1 ") <= 1 for answer in answers), "no second request is read out of a bad one"


def test_deaf_clients_are_dropped(router: RouterProcess) -> None:
    with contextlib.ExitStack() as stack, unaffected(router):
        deaf = [raw_clients.deaf_client(router.public, "/v1/completions", LONG) for _ in range(8)]
        began = time.monotonic()
        for client in deaf:
            stack.enter_context(client)
        router.wait_until(lambda: _running(router) == 0, WRITE_TIMEOUT_SECONDS + 30)
    print(f"{len(deaf)} deaf clients dropped after {time.monotonic() - began:.1f} s")


def test_half_closed_clients(router: RouterProcess) -> None:
    """A client that sends no more may still read. The router counts it as gone, as the worker does, or answers it."""
    body = {"model": "small", "prompt": "hi", "max_tokens": 2}
    request = raw_clients.post_of("/v1/completions", body, headers="Connection: close\r\n")
    with unaffected(router):
        answers = [raw_clients.send(router.public, request) for _ in range(20)]
        router.wait_until(lambda: _running(router) == 0)
    assert all(not answer or answer.startswith(b"HTTP/1.1 200") for answer in answers)


def test_pipelined_requests_are_answered_in_order(router: RouterProcess) -> None:
    count = 2000
    with unaffected(router), raw_clients.connect(router.public) as connection:
        head = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET /gone HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        requests = b"".join(head % (b"health" if number % 2 else b"none") for number in range(count)) + last
        with concurrent.futures.ThreadPoolExecutor(1) as sender:
            sending = sender.submit(connection.sendall, requests)
            answer = raw_clients.received(connection)
            with contextlib.suppress(ConnectionError):
                sending.result()
    statuses = re.findall(rb"HTTP/1.1 (\d+) ", answer)
    assert statuses == [b"404", b"200"] * (count // 2) + [b"404"]


def test_idle_connections_leave_room_for_others(router: RouterProcess) -> None:
    with contextlib.ExitStack() as stack, unaffected(router):
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(raw_clients.connect(router.public))


def test_deaf_clients_do_not_use_the_grace_period(small_folder: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(fake_worker(small_folder, tmp_path / "log-worker"))
        router = stack.enter_context(running_router([worker.admin], tmp_path / "log", ADMIN_TOKEN, *FLAGS))
        for _ in range(4):
            stack.enter_context(raw_clients.deaf_client(router.public, "/v1/completions", LONG))
        router.wait_until(lambda: _running(router), 30)
        began = time.monotonic()
        router.terminate()
        code = router.exit_code(90)
        seconds = time.monotonic() - began
    print(f"exit {code} after {seconds:.1f} s")
    assert code == 0, router.log
    assert seconds <= WRITE_TIMEOUT_SECONDS + SIGTERM_EXTRA_SECONDS


def _running(router: RouterProcess) -> int:
    """Return the number of requests that the router answers now."""
    lines = router.get("/metrics").text.splitlines()
    return int(float(next(one for one in lines if one.startswith("specdecode_router_num_requests_running")).split()[1]))
