"""Bounds of client connections over sockets: their number, headers, bodies and pipelined requests."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.faults.raw_clients import connect, post_of, received
from support.worker import fake_engine
from support.worker_process import WorkerProcess, fake, ready, worker_config

LIMITS = {"max_connections": 4, "max_unfinished_body_bytes": 100_000, "header_timeout_seconds": 2}
SILENT = {"model": "small", "prompt": [fake_engine.SILENT], "max_tokens": 4, "stream": True}


@pytest.fixture(scope="module")
def worker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Yield one worker with low limits. A test must leave it without requests."""
    config = worker_config(model_folder, server=LIMITS)
    with ready(fake(config, tmp_path_factory.mktemp("worker") / "log")) as started:
        yield started


def post(body: dict[str, Any]) -> bytes:
    return post_of("/v1/completions", body)


@pytest.mark.parametrize(
    "request_start",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
        b"GET /" + b"y" * 100_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"y" * 100_000,
    ],
    ids=["one header", "many headers", "path", "chunk extension"],
)
def test_endless_headers_are_refused(worker: WorkerProcess, request_start: bytes) -> None:
    with connect(worker.public) as opened:
        for start in range(0, len(request_start), 10_000):
            with contextlib.suppress(ConnectionError):
                opened.sendall(request_start[start : start + 10_000])
                time.sleep(0.01)
        status = received(opened).split(b"\r\n")[0]
    assert status in (b"HTTP/1.1 431 Request Header Fields Too Large", b"HTTP/1.1 400 Bad Request", b"")
    assert worker.get("/health").status_code == 200, "an empty answer is a closed connection, not a dead server"


def test_late_headers_get_408(worker: WorkerProcess) -> None:
    with connect(worker.public) as opened:
        opened.sendall(b"GET /health HTTP/1.1\r\n")
        began = time.monotonic()
        answer = received(opened)
        assert time.monotonic() - began < 5
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_connections_without_a_request_make_place_for_new_ones(worker: WorkerProcess) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(worker.public)) for _ in range(4)]
        assert worker.get("/health").status_code == 200
        assert received(idle[0]) == b""


def test_too_many_busy_connections_get_503(worker: WorkerProcess) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(worker.public)).sendall(post(SILENT))
        worker.wait_until(lambda: worker.report().running == 4)
        with connect(worker.public) as refused:
            answer = received(refused)
    assert answer.startswith(b"HTTP/1.1 503 ")
    worker.wait_until(lambda: worker.report().running == 0)
    assert worker.get("/health").status_code == 200


def test_bodies_beyond_the_budget_get_503(worker: WorkerProcess) -> None:
    refused = worker.complete("x" * 150_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bodies")
    for _ in range(3):
        assert worker.complete("x" * 60_000).status_code == 400, "budget was given back"


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"


def saying(word: str) -> dict[str, Any]:
    return {"model": "small", "prompt": f"SAY:{word}<|end|>", "max_tokens": 9}


def offering(request: bytes) -> tuple[bytes, bytes]:
    """Return headers that offer HTTP/2, as Java's HttpClient and curl --http2 do, and the body."""
    head, _, body = request.partition(b"\r\n\r\n")
    return head + b"\r\n" + OFFER + b"\r\n", body


def chunked(request: bytes) -> bytes:
    body = request.partition(b"\r\n\r\n")[2]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (body[:5], len(body) - 5, body[5:])


@pytest.mark.parametrize("encode", [bytes, chunked], ids=["length", "chunked"])
@pytest.mark.parametrize("cuts", ["none", "headers", "body"])
def test_offer_of_http2_is_ignored(worker: WorkerProcess, cuts: str, encode: Any) -> None:
    head, body = offering(encode(post(saying("one"))))
    pipelined = b"".join(offering(post(saying("two"))) + offering(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
    sent = {
        "none": [head + body + pipelined],
        "headers": [head[:70], head[70:], body + pipelined],
        "body": [head + body[:9], body[9:20], body[20:] + pipelined],
    }[cuts]
    with connect(worker.public) as opened:
        for segment in sent:
            opened.sendall(segment)
            time.sleep(0.05)
        opened.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = received(opened)
    assert answers.count(b"HTTP/1.1 200 OK") == 4, answers
    assert answers.index(b'"one') < answers.index(b'"two') < answers.index(b"ok\n") < answers.index(b'"version"')


@pytest.mark.parametrize(("target", "status"), [(b"x:80", 400), (b"/health", 405)])
def test_connect_is_refused(worker: WorkerProcess, target: bytes, status: int) -> None:
    with connect(worker.public) as opened:
        opened.sendall(b"CONNECT %b HTTP/1.1\r\nHost: x:80\r\n\r\n" % target)
        assert opened.recv(4096).startswith(b"HTTP/1.1 %d " % status)
    assert worker.get("/health").status_code == 200


def test_hang_up_of_a_pipelining_client_frees_its_requests(worker: WorkerProcess) -> None:
    with connect(worker.public) as opened:
        opened.sendall(post(SILENT) + post(SILENT))
        worker.wait_until(lambda: worker.report().running == 1)
        time.sleep(0.2)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # hang up with a reset
    worker.wait_until(lambda: worker.report().running == 0)
