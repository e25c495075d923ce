"""Client of the engine process in the server process: process start, requests, and one token stream per request.

One reader task decodes the messages of the engine and routes them by request id. If the engine process ends for any
reason, every open stream ends with EngineGone. The client does not restart the engine, since a pod that lost its
engine should be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from specdecode_worker.contract import DraftConfig, Plan, Report, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.errors import CallRefused, EngineGone
from specdecode_worker.engine.ipc import engine_process
from specdecode_worker.engine.ipc.messages import (
    Abort,
    Crashed,
    Done,
    FromEngine,
    GetReport,
    Loaded,
    SetDraft,
    SetPlan,
    SetSynthetic,
    Shutdown,
    Submit,
    ToEngine,
    Tokens,
)

_EXIT_SECONDS = 5.0


class Stream:
    """Token stream of one request, in order. Closing a stream before its end aborts the request.

    Example:
        with client.submit(request) as stream:
            async for tokens in stream: ...
    """

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._queue: asyncio.Queue[Tokens | EngineGone] = asyncio.Queue()
        self._over = False

    def deliver(self, item: Tokens | EngineGone) -> None:
        """Append tokens, or the error that ends the stream."""
        self._queue.put_nowait(item)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens:
        """Return the next tokens. Raise EngineGone if the engine ends before the request does."""
        if self._over:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineGone):
            self._over = True
            raise item
        self._over = item.finish is not None
        return item

    def close(self) -> None:
        """Abort the request if it is unfinished; a pending read raises EngineGone. May be called twice."""
        self._client._forget(self._request_id, abort=not self._over)
        if not self._over:
            self.deliver(EngineGone("the stream was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EngineClient:
    """Client of one engine process.

    ``loaded`` resolves once the engine accepts requests, ``ended`` once it has ended; each resolves at most once.
    """

    def __init__(
        self,
        config: WorkerConfig,
        plan: Plan | None,
        knobs: SyntheticKnobs | None = None,
        *,
        build: engine_process.Build | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        """Reason why the engine ended. It never resolves after ``close``."""
        self._folder = tempfile.mkdtemp(prefix="specdecode-")  # mode 0700: other users cannot connect
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._folder}/engine"
        self._socket.bind(address)
        self._streams: dict[str, Stream] = {}
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._call_ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[FromEngine])
        self._process = _spawn(address, config, plan, knobs, build)
        self._reader = asyncio.create_task(self._read())
        loop.add_reader(self._process.sentinel, self._process_ended)

    @property
    def in_flight(self) -> int:
        """Number of requests that are submitted and not finished."""
        return len(self._streams)

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        assert self._process.pid is not None
        return self._process.pid

    def submit(self, request: Submit) -> Stream:
        """Submit a request and return its token stream. Raise EngineGone if the engine has ended."""
        self._check_alive()
        assert request.request_id not in self._streams, "request ids are unique"
        stream = self._streams[request.request_id] = Stream(self, request.request_id)
        self._send(request)
        return stream

    async def set_plan(self, plan: Plan) -> None:
        """Set the plan of the engine.

        Raises:
            CallRefused: The engine refused the plan; the previous one stays in force.
            EngineGone: The engine has ended.
        """
        await self._call(lambda call_id: SetPlan(call_id, plan.model_dump_json().encode()))

    async def begin_draft_swap(self, draft: DraftConfig, name: str = "", expected_hash: str = "") -> None:
        """Start to replace the draft of this name. The default draft has an empty name. The report shows the result.

        Raises:
            CallRefused: The swap cannot be tried.
            EngineGone: The engine has ended.
        """
        body = draft.model_dump_json(exclude={"name"}).encode()
        await self._call(lambda call_id: SetDraft(call_id, body, name, expected_hash))

    async def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        """Set the synthetic knobs of the engine; None clears them.

        Raises:
            CallRefused: The engine refused the knobs; the previous ones stay in force.
            EngineGone: The engine has ended.
        """
        body = b"null" if knobs is None else knobs.model_dump_json().encode()
        await self._call(lambda call_id: SetSynthetic(call_id, body))

    async def report(self) -> Report:
        """Return the worker report of the engine. Raise EngineGone if the engine has ended."""
        return Report.model_validate_json(await self._call(GetReport))

    def end_streams(self, reason: str) -> None:
        """End every open stream with EngineGone, even if the engine is still running."""
        for stream in self._streams.values():
            stream.deliver(EngineGone(reason))

    async def close(self) -> None:
        """End the engine process. Unfinished requests are lost."""
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        # The engine reads no messages while it loads, so Shutdown would have no effect then.
        if self._process.is_alive() and self.loaded.done():
            self._send(Shutdown())
            await asyncio.to_thread(self._process.join, _EXIT_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _forget(self, request_id: str, *, abort: bool) -> None:
        if self._streams.pop(request_id, None) is not None and abort and not self.ended.done():
            self._send(Abort(request_id))

    def _send(self, message: ToEngine) -> None:
        # This never blocks: without a high-water mark, messages queue in the socket until the engine has connected.
        self._socket.send(self._encoder.encode([message]))

    async def _call(self, make: Callable[[int], ToEngine]) -> bytes:
        self._check_alive()
        call_id = next(self._call_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._send(make(call_id))
            return await answer
        finally:
            self._calls.pop(call_id, None)

    async def _read(self) -> None:
        while True:
            for message in self._decoder.decode(await self._socket.recv()):
                self._route(message)

    def _route(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                if (stream := self._streams.get(message.request_id)) is not None:
                    stream.deliver(message)
            case Done():
                self._answer(message)
            case Loaded():
                self.loaded.set_result(message)
            case Crashed(reason):
                self._end_with(reason)

    def _answer(self, done: Done) -> None:
        answer = self._calls.get(done.call_id)
        if answer is None or answer.done():
            return
        if done.error:
            answer.set_exception(CallRefused(done.error))
        else:
            answer.set_result(done.body)

    def _process_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        # A Crashed message may still be in transit; it has the better reason.
        asyncio.get_running_loop().call_later(0.2, self._end_silently)

    def _end_silently(self) -> None:
        self._process.join()
        self._end_with(f"the engine process ended with exit code {self._process.exitcode}")

    def _end_with(self, reason: str) -> None:
        if self.ended.done():
            return
        self.ended.set_result(reason)
        self.end_streams(reason)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineGone(reason))

    def _check_alive(self) -> None:
        if self.ended.done():
            raise EngineGone(self.ended.result())


def _spawn(
    address: str,
    config: WorkerConfig,
    plan: Plan | None,
    knobs: SyntheticKnobs | None,
    build: engine_process.Build | None,
) -> SpawnProcess:
    written = [one and one.model_dump_json() for one in (plan, knobs)]
    # spawn, not fork: the server has threads, and CUDA cannot be used after a fork.
    child = multiprocessing.get_context("spawn").Process(
        target=engine_process.main,
        args=(address, config.model_dump_json(), *written, build),
        name="specdecode-engine",
    )
    child.start()
    return child
