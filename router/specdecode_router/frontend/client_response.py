"""Response to a client of the generation routes: server-sent events or one body, with bounded unsent output."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from aiohttp import web
from aiohttp.http import StreamWriter

from specdecode_router.errors import ApiError
from specdecode_router.frontend.error_responses import error_parts, error_response
from specdecode_router.relay.client_stream import ClientGone, RefusedByWorker
from specdecode_router.settings import RouterSettings
from specdecode_worker.contract.internal_stream import Open, Step

_EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.01, 0.2


class ClientResponse:
    """Response that the relay writes. ``response`` is what the handler returns, once it is complete."""

    def __init__(self, request: web.Request, settings: RouterSettings) -> None:
        self._request = request
        self._max_unsent_bytes, self._write_seconds = settings.max_unsent_bytes, settings.write_timeout_seconds
        self._transport = request.transport
        self._writer: StreamWriter | None = None
        self._opening = b""
        self._headers: dict[str, str] = {}
        self.response: web.StreamResponse | None = None

    def accepts(self, opened: Open) -> bool:
        """Return True: every first frame is a beginning."""
        return True

    async def open(self, opened: Open) -> None:
        """Send headers, if the response is one of server-sent events. Its opening events wait for the first step."""
        self._headers |= dict(opened.headers)
        if not opened.stream:
            return
        self.response = web.StreamResponse(headers={**_EVENT_HEADERS, **self._headers})
        try:
            self._writer = cast(StreamWriter, await self.response.prepare(self._request))
        except ConnectionError:
            raise ClientGone("the client disconnected") from None
        self._opening = opened.opening

    async def write(self, step: Step) -> None:
        """Send the events of a step, behind the opening events. Raises ClientGone."""
        opening, self._opening = self._opening, b""
        if opening or step.events:
            await self._write(opening + step.events)

    async def _write(self, events: bytes) -> None:
        """Put events into the transport before anything is awaited. Raises ClientGone."""
        writer, transport = self._writer, self._transport
        if writer is None:
            return
        if transport is None or transport.is_closing():
            raise ClientGone("the client disconnected")
        try:
            # Waiting is done in `drain`, because one future of the protocol would be shared by two attempts.
            await writer.write(events, drain=False)
        except ConnectionError:
            raise ClientGone("the client disconnected") from None

    async def drain(self) -> None:
        """Wait while the client has too much to read. Raises ClientGone if it reads too little for too long."""
        if self._transport is not None and self._transport.get_write_buffer_size() > self._max_unsent_bytes:
            await self._wait_until_unsent(self._max_unsent_bytes // 2)

    async def end(self, body: bytes) -> None:
        """Send the last events or the whole body."""
        if self.response is None:
            await self.send(web.Response(body=body, headers=self._headers, content_type="application/json"))
            return
        if self._opening or body:
            await self._write(self._opening + body)
        await self._finish()

    async def fail(self, error: ApiError | RefusedByWorker) -> None:
        """Send an error: as the response, or as the last event if the response has begun."""
        if self.response is None:
            await self.send(error_response(error))
            return
        _, body, _ = error_parts(error)
        await self._write(b"data: " + body + b"\n\n")
        await self._finish()

    async def send(self, response: web.Response) -> None:
        """Send a whole response. Raises ClientGone."""
        self.response = response
        try:
            async with asyncio.timeout(self._write_seconds):
                await response.prepare(self._request)
                await response.write_eof()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
            raise ClientGone("the client read too little for too long") from None
        except ConnectionError:
            raise ClientGone("the client disconnected") from None
        if self._transport is not None:
            await self._wait_until_unsent(0)

    async def _finish(self) -> None:
        await self._wait_until_unsent(0)
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError:
            raise ClientGone("the client disconnected") from None

    async def _wait_until_unsent(self, unsent_bytes: int) -> None:
        """Wait until at most so many bytes are unsent. Drop the connection of a client that reads too little."""
        transport = self._transport
        assert transport is not None
        give_up, pause = time.monotonic() + self._write_seconds, _FIRST_POLL_SECONDS
        while transport.get_write_buffer_size() > unsent_bytes:
            if transport.is_closing():
                raise ClientGone("the client disconnected")
            if time.monotonic() > give_up:
                transport.abort()
                raise ClientGone("the client read too little for too long")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)
