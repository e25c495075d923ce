"""The engine's client in the server process: starts the process, sends requests and receives tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from specdecode_worker.bound_process import BoundProcess
from specdecode_worker.contract import DraftConfig, Plan, Report, SyntheticKnobs, WorkerConfig
from specdecode_worker.core.errors import CallRefused, EngineGone
from specdecode_worker.core.messages import (
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
from specdecode_worker.engine import process as engine_process
from specdecode_worker.engine.process import Build, Heartbeat, HeartbeatBlock, request_stacks

log = logging.getLogger(__name__)

# Token streams of the requests in flight, and of finished requests that are not read to their end.


class Stream:
    """Token stream of one request, in order. Closing a stream before its end aborts the request.

    Example:
        with client.submit(request) as stream:
            async for tokens in stream: ...
    """

    def __init__(self, request_id: str, on_close: Callable[[Stream, bool], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._queue: asyncio.Queue[Tokens | EngineGone] = asyncio.Queue()
        self._over = False

    def deliver(self, item: Tokens | EngineGone) -> None:
        """Append tokens, or the error that ends the stream."""
        self._queue.put_nowait(item)

    def cut(self, reason: str) -> None:
        """Drop all unread tokens and end the stream with EngineGone."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.deliver(EngineGone(reason))

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

    def close(self, *, stopped: bool = False) -> None:
        """Abort the request if it is unfinished; a pending read raises EngineGone. May be called twice.

        Args:
            stopped: The text is complete, because of a stop string. The request counts as finished.
        """
        self._on_close(self, stopped)
        if not self._over:
            self.deliver(EngineGone("the stream was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StreamTable:
    """Open streams of one engine client, by request id.

    A request is in flight until its last tokens have arrived, whether or not the client has read them. Its stream then
    stays open until it is closed. At most ``max_unread`` such streams stay open; beyond it the oldest is cut, so that
    clients that do not read cannot fill the memory.
    """

    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._in_flight: dict[str, Stream] = {}
        self._unread: dict[str, Stream] = {}

    @property
    def in_flight(self) -> int:
        """Number of requests that are submitted and not finished."""
        return len(self._in_flight)

    @property
    def unread(self) -> int:
        """Number of finished requests with an open stream."""
        return len(self._unread)

    def add(self, stream: Stream) -> None:
        """Add the stream of a new request."""
        assert stream.request_id not in self._in_flight, "request ids are unique"
        self._in_flight[stream.request_id] = stream

    def deliver(self, tokens: Tokens) -> None:
        """Append tokens to the stream of their request. Tokens of a closed stream are dropped."""
        stream = self._in_flight.get(tokens.request_id)
        if stream is None:
            return
        stream.deliver(tokens)
        if tokens.finish is not None:
            del self._in_flight[tokens.request_id]
            self._unread[tokens.request_id] = stream
            if len(self._unread) > self._max_unread:
                self._unread.pop(next(iter(self._unread))).cut("the client did not read its answer in time")

    def remove(self, request_id: str) -> bool:
        """Remove a closed stream. Return whether its request was still in flight."""
        self._unread.pop(request_id, None)
        return self._in_flight.pop(request_id, None) is not None

    def end_all(self, reason: str) -> None:
        """End the stream of every request in flight with EngineGone."""
        for stream in self._in_flight.values():
            stream.deliver(EngineGone(reason))


# Start and end of the engine process, as seen from the server process.

_REAP_SECONDS = 2.0
_KILL_SECONDS = 0.5
"""Time for a killed process to disappear. One that waits for its device in the kernel may not."""


class EngineChild:
    """The engine process with its private folder and its heartbeat. Created and used on the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        plan: Plan | None,
        knobs: SyntheticKnobs | None,
        build: Build | None,
        on_end: Callable[[], None],
    ) -> None:
        """Prepare the process. ``on_end`` is called after it has ended, unless `remove` comes first."""
        self._folder = Path(tempfile.mkdtemp(prefix="specdecode-"))  # mode 0700: other users cannot connect
        self._block = HeartbeatBlock()
        self.address = f"ipc://{self._folder}/engine"
        written = [one and one.model_dump_json() for one in (plan, knobs)]
        self._process = BoundProcess(
            target=engine_process.main,
            args=(self.address, config.model_dump_json(), *written, build, self._block, str(self._stacks)),
            name="specdecode-engine",
        )
        self._gone = asyncio.Event()
        self._on_end = on_end

    def start(self) -> None:
        """Start the process."""
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._sentinel_ready)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def heartbeat(self) -> Heartbeat:
        """The last heartbeat, also of a process that is stopped or gone."""
        return self._block.read()

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        # The sentinel of an ending process is ready a little before the kernel has its exit code.
        self._process.join(_REAP_SECONDS if self._gone.is_set() else 0)
        return self._process.exitcode

    async def stacks(self) -> str:
        """Return the stacks of the threads of the process, or why there are none."""
        return await request_stacks(self.pid, self._stacks)

    def kill(self) -> None:
        """Kill the process, with which its children end, without waiting."""
        self._process.kill()

    async def wait(self, seconds: float) -> bool:
        """Wait until the process has ended, and return whether it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)
        return self._gone.is_set()

    async def remove(self) -> None:
        """Kill the process if it runs, wait for a short time, and delete its folder. ``on_end`` is not called."""
        self._on_end = lambda: None
        if not self._gone.is_set():
            self.kill()
            await self.wait(_KILL_SECONDS)
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _stacks(self) -> Path:
        return self._folder / "stacks"

    def _sentinel_ready(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._gone.set()
        self._on_end()


# Client of the engine process in the server process: process start, requests, and one token stream per request.
#
# One reader task decodes the messages of the engine and routes them by request id. If the engine process ends for any
# reason, or the reader task does, every open stream ends with EngineGone. The client does not restart the engine, since
# a pod that lost its engine should be replaced.

_EXIT_SECONDS = 5.0
"""Time for the engine to leave after Shutdown, before it is killed. It has nothing to save."""


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
        build: Build | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        """Reason why the engine ended. It never resolves after ``close``."""
        self.child = EngineChild(config, plan, knobs, build, self._process_ended)
        """The engine process."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.child.address)
        # As many unread answers as the queue has places: their memory is of the order of that of the queue.
        self._streams = StreamTable(max_unread=config.engine.max_num_seqs + config.server.max_waiting)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._call_ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[FromEngine])
        self.child.start()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)

    @property
    def in_flight(self) -> int:
        """Number of requests that are submitted and not finished."""
        return self._streams.in_flight

    @property
    def unfinished_answers(self) -> int:
        """Number of requests in flight, and of finished requests whose tokens are not read to their end."""
        return self._streams.in_flight + self._streams.unread

    def submit(self, request: Submit) -> Stream:
        """Submit a request and return its token stream. Raise EngineGone if the engine has ended."""
        self._check_alive()
        stream = Stream(request.request_id, self._forget)
        self._streams.add(stream)
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
        """End the stream of every request in flight with EngineGone, even if the engine is still running."""
        self._streams.end_all(reason)

    def kill(self, reason: str) -> None:
        """Kill the engine process and end every stream and call with this reason."""
        self._end_with(reason)
        self.child.kill()

    async def close(self, exit_seconds: float = _EXIT_SECONDS) -> None:
        """End the engine process, by force after ``exit_seconds``. Unfinished requests are lost."""
        self._reader.remove_done_callback(self._reader_ended)
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._reader
        # The engine reads no messages while it loads, so Shutdown would have no effect then.
        if self.loaded.done() and not self.ended.done():
            self._send(Shutdown())
            await self.child.wait(exit_seconds)
        await self.child.remove()
        self._socket.close()

    def _forget(self, stream: Stream, stopped: bool) -> None:
        if self._streams.remove(stream.request_id) and not self.ended.done():
            self._send(Abort(stream.request_id, stopped))

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

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if reader.cancelled() or (error := reader.exception()) is None:
            return
        log.error("the reader of the engine's messages failed", exc_info=error)
        self.kill(f"the reader of the engine's messages failed: {type(error).__name__}: {error}")

    async def _read(self) -> None:
        while True:
            for message in self._decoder.decode(await self._socket.recv()):
                self._route(message)

    def _route(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                self._streams.deliver(message)
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
        # A Crashed message may still be in transit; it has the better reason.
        asyncio.get_running_loop().call_later(0.2, self._end_silently)

    def _end_silently(self) -> None:
        self._end_with(f"the engine process ended with exit code {self.child.exit_code}")

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
