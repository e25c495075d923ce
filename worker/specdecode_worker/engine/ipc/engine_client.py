"""Client of the engine process in the server process: process start, requests, and one token stream per request.

One reader task decodes the messages of the engine and routes them by request id. If the engine process ends for any
reason, or the reader task does, every open stream ends with EngineGone. The client does not restart the engine, since a
pod that lost its engine should be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from specdecode_worker.contract import DraftConfig, Plan, Report, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.errors import CallRefused, EngineGone
from specdecode_worker.engine.ipc.engine_child import EngineChild
from specdecode_worker.engine.ipc.engine_interface import Build
from specdecode_worker.engine.ipc.heartbeat import Heartbeat
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
from specdecode_worker.engine.ipc.token_streams import Stream, StreamTable

_EXIT_SECONDS = 5.0
"""Time for the engine to leave after Shutdown, before it is killed. It has nothing to save."""

log = logging.getLogger(__name__)


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
        self._child = EngineChild(config, plan, knobs, build, self._process_ended)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._child.address)
        # As many unread answers as the queue has places: their memory is of the order of that of the queue.
        self._streams = StreamTable(max_unread=config.engine.max_num_seqs + config.server.max_waiting)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._call_ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[FromEngine])
        self._child.start()
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

    @property
    def pid(self) -> int:
        """Process id of the engine process."""
        return self._child.pid

    @property
    def heartbeat(self) -> Heartbeat:
        """Last heartbeat of the engine process."""
        return self._child.heartbeat

    async def stacks(self) -> str:
        """Return the stacks of the engine's threads, or why it gives none."""
        return await self._child.stacks()

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
        self._child.kill()

    async def close(self, exit_seconds: float = _EXIT_SECONDS) -> None:
        """End the engine process, by force after ``exit_seconds``. Unfinished requests are lost."""
        self._reader.remove_done_callback(self._reader_ended)
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._reader
        # The engine reads no messages while it loads, so Shutdown would have no effect then.
        if self.loaded.done() and not self.ended.done():
            self._send(Shutdown())
            await self._child.wait(exit_seconds)
        await self._child.remove()
        self._socket.close()

    def _forget(self, stream: Stream) -> None:
        if self._streams.remove(stream.request_id) and not self.ended.done():
            self._send(Abort(stream.request_id))

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
        self._end_with(f"the engine process ended with exit code {self._child.exit_code}")

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
