"""The router's port: routes, limits, error objects and headers as a worker has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from pathlib import Path

import pytest
from aiohttp import web

from specdecode_router.frontend.connection_sweeper import ConnectionSweeper
from specdecode_router.frontend.lifecycle import Lifecycle, State
from support.certificates import self_signed
from support.faults.raw_clients import connect, post_of
from support.router_harness import RouterUnderTest, router_over
from support.stand_in_worker import Script, StandInWorker, error_frame, text_of
from support.virtual_loop import run_virtual
from support.waiting import eventually

CHAT = "/v1/chat/completions"
ALICE = {"Authorization": "Bearer key-of-alice-0123456789"}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """Return a file with the key of Alice."""
    file = tmp_path / "keys"
    file.write_text("alice=key-of-alice-0123456789\n")
    return str(file)


def body(**fields: object) -> bytes:
    return json.dumps({"messages": [], **fields}).encode()


async def test_stream_has_the_headers_of_a_worker() -> None:
    async with router_over(Script()) as router:
        sent = body(stream=True)
        status, headers, answer = await router.post(CHAT, data=sent, headers={"X-Request-Id": "id.1"})
        assert status == 200
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert (headers["Cache-Control"], headers["X-Accel-Buffering"]) == ("no-cache", "no")
        assert headers["X-Request-Id"] == "id.1"
        first, *events, last, rest = answer.decode().split("\n\n")
        assert (first, last, rest) == ('data: {"opening": 0}', "data: [DONE]", "")
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"] for event in events]
        assert "".join(texts) == text_of(sent, 20)


@pytest.mark.parametrize("headers", [{}, {"X-Specdecode-Event-Ids": "true"}])
async def test_opening_events_come_with_the_first_step(headers: dict[str, str]) -> None:
    async with (
        router_over(Script(silent_at=0)) as router,
        router.client.post(CHAT, data=body(stream=True), headers=headers) as response,
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.2)
        router.workers[0].voice.set()
        assert b'data: {"opening": 0}\n\n' in await response.content.readany()


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_of_the_worker_reach_the_client(stream: bool) -> None:
    async with router_over(Script(headers=(("X-Specdecode-Ignored", "foo"),))) as router:
        status, headers, _ = await router.post(CHAT, data=body(stream=stream), headers={"X-Request-Id": "id.1"})
        assert (status, headers["X-Specdecode-Ignored"], headers["X-Request-Id"]) == (200, "foo", "id.1")


async def test_whole_answer_and_what_the_worker_gets() -> None:
    async with router_over(Script()) as router:
        sent = body()
        headers = {"X-Specdecode-Task": "code", "X-Specdecode-Capture": "false", "X-Request-Timeout": "7"}
        status, answer, content = await router.post("/v1/completions", data=sent, headers=headers)
        assert (status, json.loads(content)["texts"]) == (200, [text_of(sent, 20)])
        assert answer["Content-Type"] == "application/json"
        (asked,) = router.workers[0].requests
        assert (asked.route, asked.body, asked.task, asked.capture) == ("/v1/completions", sent, "code", "false")
        assert asked.request_id == answer["X-Request-Id"]
        assert asked.tenant == ""
        assert 6 < (asked.timeout_seconds or 0) <= 7


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "soon"])
async def test_invalid_timeouts(timeout: str) -> None:
    async with router_over(Script()) as router:
        status, _, content = await router.post(CHAT, data=body(), headers={"X-Request-Timeout": timeout})
        error = json.loads(content)["error"]
        assert (status, error["param"], error["code"]) == (400, "X-Request-Timeout", "invalid_value")


async def test_refusal_of_a_worker_is_unchanged() -> None:
    refusal = error_frame(429, "rate_limit_exceeded", retryable=True)
    async with router_over(Script(refuse=refusal)) as router:
        status, headers, content = await router.post(CHAT, data=body(stream=True))
        assert (status, content, headers["Retry-After"]) == (429, refusal.body, "1")
        assert headers["Content-Type"] == "application/json"


async def test_error_in_a_stream_is_its_last_event() -> None:
    refusal = error_frame(504, "deadline_exceeded", retryable=False)
    async with router_over(Script(refuse=refusal, refuse_at=2)) as router:
        status, _, content = await router.post(CHAT, data=body(stream=True))
        assert status == 200
        assert content.endswith(b"\n\ndata: " + refusal.body + b"\n\n")


async def test_no_continuation_is_a_clear_error_event() -> None:
    async with router_over(Script(close_at=2), no_worker_seconds=0.3) as router:
        _, _, content = await router.post(CHAT, data=body(stream=True))
        error = json.loads(content.decode().split("\n\n")[-2].removeprefix("data: "))["error"]
        assert error["code"] == "no_worker"


async def test_limits_of_bodies() -> None:
    async with router_over(Script(), max_body_bytes=1000, body_timeout_seconds=0.3) as router:
        status, _, content = await router.post(CHAT, data=b"x" * 1001)
        error = json.loads(content)["error"]
        assert (status, error["message"], error["code"]) == (413, "the body has more than 1000 bytes", "body_too_large")
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()


async def test_other_public_routes_are_forwarded() -> None:
    async with router_over(Script()) as router:
        for path in ("/v1/models", "/v1/models/org%2Fname?x=1", "/version", "/openapi.json"):
            status, _, content = await router.get(path)
            assert (status, json.loads(content)["path"]) == (200, f"/internal/v1/public{path}")
        for path in ("/tokenize", "/v1/responses", "/v1/embeddings"):
            status, _, content = await router.post(path, data=b'{"prompt": "a"}')
            assert json.loads(content)["body"] == '{"prompt": "a"}'


async def test_forwarded_requests_have_bounds_of_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asyncio.Event()

    async def wait(worker: StandInWorker, request: web.Request) -> web.Response:
        worker.forwarded += 1
        await answer.wait()
        return web.json_response({})

    monkeypatch.setattr(StandInWorker, "_public", wait)
    monkeypatch.setattr("specdecode_router.frontend.forwarding._MAX_AT_ONCE", 2)
    async with router_over(Script(), max_unfinished_body_bytes=1000) as router:
        asked = [asyncio.create_task(router.post("/tokenize", data=b"x" * 900))]
        await eventually(lambda: router.workers[0].forwarded == 1)
        status, headers, content = await asyncio.wait_for(router.post("/tokenize", data=b"x" * 900), 2)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(content)["error"]["code"] == "too_many_bodies"
        asked += [asyncio.create_task(router.post("/tokenize", data=b"{}")) for _ in range(4)]
        await asyncio.sleep(0.2)
        assert router.workers[0].forwarded == 2
        assert (await router.post(CHAT, data=b"{}".ljust(900)))[0] == 200, "they have bounds of their own"
        answer.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 5
        assert router.workers[0].forwarded == 5


async def test_unknown_paths_and_methods() -> None:
    async with router_over(Script()) as router:
        status, _, content = await router.get("/v1/report")
        assert (status, json.loads(content)["error"]["message"]) == (404, "GET /v1/report: Not Found")
        status, headers, content = await router.get(CHAT)
        assert (status, headers["Allow"]) == (405, "POST")
        status, _, _ = await router.get("/internal/v1/streams")
        assert status == 404


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_goes_is_cancelled_at_the_worker(stream: bool) -> None:
    async with router_over(Script(tokens=100_000)) as router:
        task = asyncio.create_task(router.post(CHAT, data=body(stream=stream)))
        await eventually(lambda: router.workers[0].sent_bytes > 2000)
        task.cancel()
        await eventually(lambda: router.workers[0].cancelled)
        await eventually(lambda: not router.state.lifecycle.running)


async def slow_client(router: RouterUnderTest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream and read nothing of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
    writer.write(post_of(CHAT, body(stream=True)))
    return reader, writer


async def small_connection(router: RouterUnderTest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with the smallest buffers, so that an answer that is not read soon fills them."""
    small = connect(f"http://127.0.0.1:{router.port}", receive_buffer_bytes=4096)
    return await asyncio.open_connection(sock=small, limit=1024)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Long: %s\r\n" % (b"a" * 8000) * 60 + b"\r\n",
    ],
    ids=["bodies", "headers"],
)
async def test_requests_behind_a_running_one_wait_unread(request_bytes: bytes) -> None:
    async with router_over(Script(silent_at=0)) as router:
        _, writer = await slow_client(router)
        await eventually(lambda: router.workers[0].running)
        writer.write(request_bytes * 40)
        await asyncio.sleep(0.5)
        assert writer.transport.get_write_buffer_size() > 6_000_000, "the kernel holds ten megabytes at most"
        # The router does not read, so it only learns from the next write that the connection was reset.
        no_linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        writer.transport.abort()
        router.workers[0].voice.set()
        await eventually(lambda: not router.state.lifecycle.running)


async def test_slow_client_stops_the_worker_and_is_dropped() -> None:
    script = Script(tokens=1_000_000, interval_seconds=0, event_bytes=20_000)
    async with router_over(script, Script(), write_timeout_seconds=1, max_unsent_bytes=64 * 1024) as router:
        _, writer = await slow_client(router)
        busy = router.workers
        await eventually(lambda: any(worker.running for worker in busy))
        await asyncio.sleep(0.7)
        busy[0].script.tokens = 20
        fast = await asyncio.wait_for(router.post(CHAT, data=body(stream=True)), 2)
        assert fast[0] == 200, "others are answered meanwhile"
        sent = sum(worker.sent_bytes for worker in busy)
        await asyncio.sleep(0.2)
        assert sum(worker.sent_bytes for worker in busy) < sent + 1000, "the worker is not read any more"
        await eventually(lambda: not router.state.lifecycle.running, 3)
        assert sum(len(worker.requests) for worker in busy) == 2, "a slow client is no failed worker"
        writer.close()


@pytest.mark.parametrize("forwarded", [False, True], ids=["made", "forwarded"])
async def test_client_that_does_not_read_a_large_answer_is_dropped(forwarded: bool) -> None:
    async with router_over(Script(tokens=200_000, per_step=200_000), write_timeout_seconds=0.5) as router:
        reader, writer = await small_connection(router)
        content = b"x" * 4_000_000 if forwarded else body(stream=False)
        answer = len(content) if forwarded else len(text_of(content, 200_000))
        writer.write(post_of("/tokenize" if forwarded else "/v1/completions", content))
        worker = router.workers[0]
        await eventually(lambda: worker.forwarded if forwarded else worker.ended, 20)
        await eventually(lambda: not router.state.lifecycle.running)
        received = await asyncio.wait_for(reader.read(-1), 5)
        assert len(received) < answer, "the connection was dropped in the middle"
        writer.close()


@pytest.mark.parametrize(("settings", "left"), [({"write_timeout_seconds": 0.2}, 0), ({"max_connections": 1}, 1)])
async def test_clients_that_do_not_read_the_answers_of_probes_are_dropped(
    settings: dict[str, float], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[web.Server] = []
    run = ConnectionSweeper.run

    async def recorded(sweeper: ConnectionSweeper, server: web.Server) -> None:
        servers.append(server)
        await run(sweeper, server)

    monkeypatch.setattr(ConnectionSweeper, "run", recorded)
    monkeypatch.setattr("specdecode_router.frontend.connection_sweeper.SWEEP_SECONDS", 0.05)
    async with router_over(Script(), **settings) as router:
        writers = []
        for _ in range(2):
            _, writer = await small_connection(router)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
            writers.append(writer)
        await asyncio.sleep(0.3)
        await eventually(lambda: len(servers[0].connections) == left, 3)
        for writer in writers:
            writer.transport.abort()


@pytest.mark.slow
async def test_connections_whose_clients_do_not_answer_the_end_of_tls_are_dropped(tmp_path: Path) -> None:
    certificate, key = map(str, self_signed(tmp_path, "tls"))
    settings = {"tls_cert_file": certificate, "tls_key_file": key, "header_timeout_seconds": 0.3}
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, sent)
    async with router_over(Script(), **settings) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        while tls.version() is None:
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            writer.write(sent.read())
            if tls.version() is None:
                received.write(await reader.read(65536))
        await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_connections_that_had_a_request_make_room_too() -> None:
    async with (
        router_over(Script(tokens=100_000), max_connections=3) as router,
        router.client.post(CHAT, data=body(stream=True)) as running,
    ):
        many = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(6)]
        for reader, writer in many:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        closed = [asyncio.create_task(reader.read()) for reader, _ in many]
        await eventually(lambda: sum(one.done() for one in closed) == 4)
        assert [one.done() for one in closed] == [True] * 4 + [False] * 2, "the oldest ones"
        assert await running.content.readline()
        for one, (_, writer) in zip(closed, many, strict=True):
            one.cancel()
            writer.close()


async def test_keys_of_tenants(keys: str) -> None:
    async with router_over(Script(), api_keys_path=keys) as router:
        status, headers, content = await router.post(CHAT, data=body())
        assert (status, json.loads(content)["error"]["code"]) == (401, "invalid_api_key")
        assert headers["WWW-Authenticate"] == "Bearer"
        assert (await router.get("/v1/models"))[0] == 401
        assert (await router.get("/version"))[0] == 200
        assert (await router.post(CHAT, data=body(), headers=ALICE))[0] == 200
        assert (router.workers[0].requests[0].tenant, router.workers[0].requests[0].cache_salt) == ("alice", "alice")


async def test_probes_and_shutdown() -> None:
    async with router_over(Script(tokens=100, interval_seconds=0.01)) as router:
        assert (await router.get("/ready"))[0] == 200
        running = asyncio.create_task(router.post(CHAT, data=body(stream=True)))
        await eventually(lambda: router.workers[0].running)
        leaving = asyncio.create_task(router.state.lifecycle.shut_down(0.2, 10))
        await asyncio.sleep(0.05)
        assert (await router.get("/ready"))[0] == 503
        assert (await router.get("/health"))[0] == 200
        status, headers, _ = await router.post("/tokenize", data=b"{}")
        assert (status, headers["Connection"]) == (200, "close")
        await asyncio.sleep(0.3)
        status, headers, content = await router.post(CHAT, data=body())
        assert (status, json.loads(content)["error"]["code"], headers["Retry-After"]) == (503, "draining", "1")
        assert (await running)[2].endswith(b"[DONE]\n\n")
        assert await leaving == 0


async def raw(router: RouterUnderTest, request: bytes) -> bytes:
    """Send bytes as they are, and return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


async def test_a_stream_on_which_the_router_fails_has_no_second_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_over(Script()) as router:
        monkeypatch.setattr("specdecode_router.relay.worker_choice.WorkerChoice.record_end", None)
        answer = await raw(router, post_of(CHAT, body(stream=True), headers="Connection: close\r\n"))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert (answer.count(b"HTTP/1.1"), answer.count(b"internal_error")) == (1, 0)


async def test_headers_that_are_no_utf8() -> None:
    async with router_over(Script()) as router:
        lines = (b"POST /v1/completions HTTP/1.1", b"Host: x", b"Connection: close", b"Content-Length: 2",
                 b"X-Specdecode-Task: caf\xe9", b"X-Specdecode-Capture: \xff", b"", b"{}")  # fmt: skip
        assert (await raw(router, b"\r\n".join(lines))).startswith(b"HTTP/1.1 200 OK\r\n")
        (asked,) = router.workers[0].requests
        assert (asked.task, asked.capture) == ("caf?", "?")


async def test_forwarded_requests_may_name_the_whole_url() -> None:
    async with router_over(Script()) as router:
        answer = await raw(router, b"GET http://a.b/v1/models?x=1 HTTP/1.1\r\nHost: a.b\r\nConnection: close\r\n\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["path"] == "/internal/v1/public/v1/models?x=1"


async def test_every_answer_has_the_id_of_its_request(keys: str) -> None:
    refusal = error_frame(429, "rate_limit_exceeded", retryable=False)
    async with router_over(Script(refuse=refusal), api_keys_path=keys, max_body_bytes=99) as router:
        named = {**ALICE, "X-Request-Id": "id.1"}
        answers = [
            (401, await router.post(CHAT, data=body(), headers={"X-Request-Id": "id.1"})),
            (429, await router.post(CHAT, data=body(), headers=named)),
            (400, await router.post(CHAT, data=body(), headers={**named, "X-Request-Timeout": "soon"})),
            (413, await router.post(CHAT, data=b"x" * 100, headers=named)),
            (404, await router.get("/unknown", headers=named)),
            (405, await router.get(CHAT, headers=named)),
            (200, await router.get("/v1/models", headers=named)),
        ]
        assert [(status, headers.get("X-Request-Id")) for _, (status, headers, _) in answers] == [
            (status, "id.1") for status, _ in answers
        ]
        _, headers, _ = await router.post(CHAT, data=body(), headers=ALICE)
        assert headers["X-Request-Id"] == router.workers[0].requests[-1].request_id != "id.1"


async def test_every_answer_is_counted(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"api_keys_path": keys, "max_body_bytes": 99, "max_unfinished_body_bytes": 90}
    async with router_over(Script(), **settings) as router:

        def counted(tenant: str, code: int) -> float:
            labels = {"tenant": tenant, "code": str(code)}
            return router.state.relay.metrics.registry.get_sample_value("specdecode_router_requests_total", labels) or 0

        assert (await router.post(CHAT, data=body()))[0] == 401
        assert (await router.post(CHAT, data=body(), headers={**ALICE, "X-Request-Timeout": "soon"}))[0] == 400
        assert (await router.post(CHAT, data=b"x" * 100, headers=ALICE))[0] == 413
        status, _, content = await router.post(CHAT, data=b"x" * 95, headers=ALICE)
        assert (status, json.loads(content)["error"]["code"]) == (503, "too_many_bodies")
        assert [counted("", 401), *(counted("alice", code) for code in (400, 413, 503))] == [1, 1, 1, 1]
        with monkeypatch.context() as patch:
            patch.setattr("specdecode_router.frontend.generation.Relay", None)
            assert (await router.post(CHAT, data=body(), headers=ALICE))[0] == 500
        assert (counted("alice", 500), counted("alice", 499)) == (1, 0)
        await router.state.lifecycle.shut_down(0, 0)
        assert (await router.post(CHAT, data=body(), headers=ALICE))[0] == 503
        assert counted("", 503) == 1


async def test_models_are_answered_from_the_last_answer_without_a_worker() -> None:
    async with router_over(Script()) as router:
        workers = router.state.relay.workers
        seen = await router.get("/v1/models")
        workers.update([])
        status, headers, content = await router.get("/v1/models")
        assert (status, headers["Content-Type"].split(";")[0], content) == (200, "application/json", seen[2])
        assert (await router.get("/v1/models/a"))[0] == 503, "it was not seen before"
        assert (await router.get("/version"))[0] == 503


async def test_forwarded_requests_are_spread() -> None:
    async with router_over(Script(), Script()) as router:
        for number in range(40):
            await router.post("/tokenize", data=b'{"prompt": "%d"}' % number)
        assert all(worker.forwarded > 5 for worker in router.workers)


# --- shutdown -------------------------------------------------------------------------------------------------------


async def _leave(delay_seconds: float, grace_seconds: float) -> tuple[int, float, State]:
    """Shut down with a request that does not end. Return what is left, the time it took, and the state before."""
    loop, lifecycle = asyncio.get_running_loop(), Lifecycle()
    with lifecycle.request():
        leaving = asyncio.ensure_future(lifecycle.shut_down(delay_seconds, grace_seconds))
        await asyncio.sleep(delay_seconds - 0.1)
        state = lifecycle.state
        return await leaving, loop.time(), state


def test_the_grace_period_begins_after_the_endpoint_delay() -> None:
    assert run_virtual(_leave(1, 1.5)) == (1, 2.5, State.LEAVING)
    assert run_virtual(_leave(2, 1)) == (1, 3, State.LEAVING), "a delay that is longer than the grace period"


def test_a_router_without_requests_leaves_after_the_delay() -> None:
    lifecycle = Lifecycle()
    assert run_virtual(lifecycle.shut_down(2, 60)) == 0
    assert lifecycle.state is State.REFUSING
