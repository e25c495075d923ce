"""Stand-in for a worker's admin port: internal streams with a scripted text, and faults on request.

Token i of choice c is ``token_id(body, c, i)``, so every stand-in continues a request with the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from specdecode_worker.contract.internal_stream import (
    ALIVE_SECONDS,
    CONTENT_TYPE,
    INTERNAL_STREAMS,
    ROUTER_HEADER,
    WORKER_LOAD,
    Alive,
    ChoiceCounters,
    ChoiceProgress,
    ChoiceStart,
    End,
    Error,
    Frame,
    Moved,
    Open,
    OpenStream,
    Step,
    WorkerLoad,
    decode_document,
    encode_document,
    encode_frame,
)

TOKEN = "token-of-the-router"


def token_id(body: bytes, choice: int, index: int) -> int:
    return zlib.crc32(b"%d %d " % (choice, index) + body) % 100_000


def text_of(body: bytes, tokens: int, choice: int = 0) -> str:
    return "".join(f"{token_id(body, choice, index)} " for index in range(tokens))


def error_frame(status: int, code: str, *, retryable: bool) -> Error:
    body = {"error": {"message": f"refused by {code}", "type": "server_error", "param": None, "code": code}}
    return Error(status=status, body=json.dumps(body).encode(), retryable=retryable, headers=(("Retry-After", "1"),))


@dataclass
class Script:
    """Behaviour of a stand-in. All fields may change while it runs; counts are tokens of the first choice."""

    tokens: int = 20
    per_step: int = 1
    interval_seconds: float = 0.002
    key: str = "key-1"
    max_num_seqs: int = 64
    opening: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    event_bytes: int = 0
    """Size up to which each event is padded."""
    alive_seconds: float = ALIVE_SECONDS
    refuse: Error | None = None
    refuse_at: int = 0
    close_before_open: bool = False
    close_at: int | None = None
    cut_frame_at: int | None = None
    move_at: int | None = None
    silent_at: int | None = None
    repeat_steps: bool = False
    skip_at: int | None = None
    open_delay_seconds: float = 0.0
    resumed_delay_seconds: float = 0.0
    """Time before the first step of a resumed stream."""


class _Close(Exception):
    """The connection ends here."""


@dataclass
class StandInWorker:
    """One stand-in. ``requests`` are those that it got; ``ended`` counts streams that were complete."""

    script: Script = field(default_factory=Script)
    requests: list[OpenStream] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    """Trace context of each request; empty without one."""
    ended: int = 0
    cancelled: int = 0
    clients: Counter[str] = field(default_factory=Counter)
    """Running streams by tenant."""
    routers: set[str] = field(default_factory=set)
    """Names of the routers that asked for the load."""
    forwarded: int = 0
    """Number of public requests."""
    sent_bytes: int = 0
    voice: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it to let silent streams go on."""
    url: str = ""
    token: str = TOKEN
    """The only token that it accepts."""

    @property
    def running(self) -> int:
        return self.clients.total()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[self._check_token])
        app.router.add_post(INTERNAL_STREAMS, self._stream)
        app.router.add_get(WORKER_LOAD, self._load)
        app.router.add_route("*", "/internal/v1/public/{path:.*}", self._public)
        return app

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        return await handler(request)

    async def _load(self, request: web.Request) -> web.Response:
        self.routers.add(request.headers[ROUTER_HEADER])
        load = WorkerLoad(
            routers=tuple(sorted(self.routers)),
            settled=True,
            clients=dict(self.clients),
            max_num_seqs=self.script.max_num_seqs,
            draining=False,
            compatibility_key=self.script.key,
            model="",
        )
        return web.Response(body=encode_document(load))

    async def _public(self, request: web.Request) -> web.Response:
        self.forwarded += 1
        seen = {"path": request.raw_path, "method": request.method, "body": (await request.read()).decode()}
        return web.json_response(seen)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        asked = decode_document(OpenStream, await request.read())
        self.requests.append(asked)
        self.traceparents.append(request.headers.get("traceparent", ""))
        if self.script.close_before_open:
            await _drop(request)
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        await response.prepare(request)
        self.clients[asked.tenant] += 1
        try:
            await _Stream(self, asked, response).run()
            self.ended += 1
        except _Close:
            await _drop(request)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.clients -= Counter((asked.tenant,))
        await response.write_eof()
        return response


async def _drop(request: web.Request) -> None:
    """Drop the connection, which cancels the handler."""
    request.transport.abort()
    await asyncio.Event().wait()


class _Stream:
    def __init__(self, worker: StandInWorker, asked: OpenStream, response: web.StreamResponse) -> None:
        self._worker, self._script, self._asked, self._response = worker, worker.script, asked, response
        fields: dict[str, Any] = json.loads(asked.body)
        self._choices = int(fields.get("n", 1))
        self._streamed = bool(fields.get("stream"))
        self._tokens = int(fields.get("max_tokens", worker.script.tokens))
        resume = asked.resume
        self._progress = list(resume.choices) if resume is not None else [ChoiceProgress()] * self._choices

    async def run(self) -> None:
        script = self._script
        if script.refuse is not None and not script.refuse_at:
            await self._send(script.refuse)
            return
        await asyncio.sleep(script.open_delay_seconds)
        await self._send(self._opened())
        alive = asyncio.create_task(self._send_alive())
        try:
            if self._asked.resume is not None:
                await asyncio.sleep(script.resumed_delay_seconds)
            first = min(len(progress.ids) for progress in self._progress)
            for index in range(first, self._tokens, script.per_step):
                if (last := await self._faults(index)) is not None:
                    await self._send(last)
                    return
                for choice in range(self._choices):
                    await self._step(choice, index)
                await asyncio.sleep(script.interval_seconds)
            if script.silent_at is not None and script.silent_at >= self._tokens:
                await self._worker.voice.wait()
            await self._send(self._end())
        finally:
            alive.cancel()

    async def _faults(self, index: int) -> Frame | None:
        script = self._script
        if script.cut_frame_at is not None and index >= script.cut_frame_at:
            frame = encode_frame(self._step_frame(0, index, script.per_step))
            await self._response.write(frame[: len(frame) // 2])
            await asyncio.sleep(0.02)
            raise _Close
        if script.silent_at is not None and index >= script.silent_at:
            await self._worker.voice.wait()
        if script.close_at is not None and index >= script.close_at:
            raise _Close
        if script.move_at is not None and index >= script.move_at:
            return Moved(block_port=8002)
        if script.refuse is not None and index >= script.refuse_at:
            return script.refuse
        return None

    def _opened(self) -> Open:
        opening = b"".join(b'data: {"opening": %d}\n\n' % choice for choice in range(self._choices))
        return Open(
            compatibility_key=self._script.key,
            prompts=((1, 2, 3),),
            choices=tuple(ChoiceStart(prompt=0, sampling=b"s%d" % choice) for choice in range(self._choices)),
            created=1_700_000_000,
            stream=self._streamed,
            opening=opening if self._streamed and self._script.opening else b"",
            headers=self._script.headers,
        )

    async def _step(self, choice: int, index: int) -> None:
        ids = self._progress[choice].ids
        if len(ids) > index:
            # Another choice was behind when the first worker went.
            known = len(ids) - index
            if known >= self._script.per_step:
                return
            index, count = len(ids), self._script.per_step - known
        else:
            count = self._script.per_step
        if index == self._script.skip_at:
            return
        end = min(index + count, self._tokens)
        delivered = (self._asked.delivered or (0,) * self._choices)[choice]
        cuts = [index, *([delivered] if index < delivered < end else []), end]
        for first, last in itertools.pairwise(cuts):
            step = self._step_frame(choice, first, last - first)
            bare = msgspec.structs.replace(step, events=b"") if last <= delivered else step
            for _ in range(2 if self._script.repeat_steps else 1):
                await self._send(bare)

    def _step_frame(self, choice: int, index: int, count: int) -> Step:
        ids = tuple(token_id(self._asked.body, choice, index + offset) for offset in range(count))
        text = "".join(f"{one} " for one in ids)
        chunk = {"choices": [{"index": choice, "delta": {"content": text}}]}
        event = msgspec.json.encode(chunk).ljust(self._script.event_bytes)
        return Step(
            choice=choice,
            index=index,
            ids=ids,
            counters=ChoiceCounters(cached_tokens=index),
            events=b"data: " + event + b"\n\n" if self._streamed else b"",
        )

    def _end(self) -> End:
        tokens = self._tokens * self._choices
        texts = [text_of(self._asked.body, self._tokens, choice) for choice in range(self._choices)]
        body = b"data: [DONE]\n\n" if self._streamed else json.dumps({"texts": texts}).encode()
        return End(body=body, prompt_tokens=3, completion_tokens=tokens)

    async def _send_alive(self) -> None:
        step = 0
        while True:
            await asyncio.sleep(self._script.alive_seconds)
            step += 1
            if self._script.silent_at is None or self._worker.voice.is_set():
                await self._send(Alive(step=step, longest_step_seconds=0.01))

    async def _send(self, frame: Frame) -> None:
        data = encode_frame(frame)
        self._worker.sent_bytes += len(data)
        await self._response.write(data)


@contextlib.asynccontextmanager
async def running(worker: StandInWorker) -> AsyncIterator[StandInWorker]:
    """Run a stand-in on a free port of loopback; on exit all of its connections are dropped."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)  # else the kernel takes megabytes of a stream
    runner = web.AppRunner(
        worker.application(), handler_cancellation=True, shutdown_timeout=0.01, access_log=None, keepalive_timeout=75
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=2048).start()
    worker.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield worker
    finally:
        await runner.cleanup()
