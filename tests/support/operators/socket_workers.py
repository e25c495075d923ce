"""Admin ports of workers on real sockets: every worker has a loopback address of its own, and its own behaviour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from specdecode_worker.contract import Header, Plan, Port
from support.operators.fleet import SimulatedWorker, Truth


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")


Behaviour = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def good_report(**fields: Any) -> dict[str, Any]:
    """Return the report of a simulated worker, as JSON would give it."""
    worker = SimulatedWorker(Truth(), plan=Plan(max_depth=5))
    worker.run(2)
    return {**json.loads(worker.report().model_dump_json()), **fields}


def answer(writer: asyncio.StreamWriter, status: int, body: bytes = b"", **headers: str) -> None:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


async def hanging(request: Request, writer: asyncio.StreamWriter) -> None:
    """Accept the request and never answer."""
    await asyncio.Event().wait()


async def dripping(request: Request, writer: asyncio.StreamWriter) -> None:
    """Send one byte a second."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(1)


async def garbage(request: Request, writer: asyncio.StreamWriter) -> None:
    """Answer something that is not HTTP."""
    writer.write(b"\x00\xff not HTTP at all\r\n" * 20)


@dataclass(slots=True)
class GoodWorker:
    """Worker that behaves: it answers with its report, and takes plans."""

    tokens: set[str] = field(default_factory=lambda: {"secret"})
    fields: dict[str, Any] = field(default_factory=good_report)
    asked: list[str] = field(default_factory=list)
    """Tokens of all requests."""
    plans: list[Plan] = field(default_factory=list)
    push_status: int = 200
    tag: str = ""

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.asked.append(request.token)
        if request.token not in self.tokens:
            answer(writer, 401)
            return
        if request.method == "PUT":
            if self.push_status == 200:
                plan = Plan.model_validate_json(request.body)
                self.plans.append(plan)
                self.fields["plan"] = {"uid": plan.uid, "version": plan.version, "quiet": plan.quiet}
            answer(writer, self.push_status, b"{}")
        elif self.tag and request.headers.get("if-none-match") == self.tag:
            answer(writer, 304, **{Header.clock_seconds: "77.5"})
        else:
            answer(writer, 200, json.dumps(self.fields).encode(), **({"ETag": self.tag} if self.tag else {}))


class SocketWorkers:
    """All workers of a test. The addresses depend on the process, so that parallel tests do not meet."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def add(self, behaviour: Behaviour, *, tls: ssl.SSLContext | None = None) -> str:
        """Start a worker. Return its address."""
        number = len(self._servers) + 1
        address = f"127.{64 + (os.getpid() >> 8 & 63)}.{os.getpid() & 255}.{number}"

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await behaviour(await _read(reader), writer)
                await writer.drain()
            writer.close()

        self._servers.append(await asyncio.start_server(handle, address, Port.admin, ssl=tls))
        return address

    async def aclose(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def socket_workers() -> contextlib.AbstractAsyncContextManager[SocketWorkers]:
    return contextlib.aclosing(SocketWorkers())


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split(" ")
    return Request(method, path, headers, body)
