"""Stand-in worker for `router_streams.py` that costs little CPU: internal streams straight on the transport.

Its text is that of tests/support/stand_in_worker.py. It has no faults but its own end.

    lean_stand_in.py PORT INTERVAL_SECONDS TOKENS
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import uvloop

from specdecode_worker.contract.internal_stream import (
    ALIVE_SECONDS,
    Alive,
    ChoiceCounters,
    ChoiceStart,
    End,
    Open,
    OpenStream,
    Step,
    decode_document,
    encode_frame,
)
from support.stand_in_worker import token_id

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.specdecode.frames\r\nConnection: close\r\n\r\n"
_REPORT = b'{"running": 0, "max_num_seqs": 1024, "compatibility_key": "key-1"}'


class Connection(asyncio.Protocol):
    """One request: a report, or an internal stream."""

    def __init__(self, interval_seconds: float, tokens: int) -> None:
        self._interval, self._tokens = interval_seconds, tokens
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET"):
            self._received = b""
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_REPORT) + _REPORT)
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) >= length:
            self._begin(decode_document(OpenStream, body))

    def _begin(self, asked: OpenStream) -> None:
        self._asked = asked
        self._index = 0 if asked.resume is None else len(asked.resume.choices[0].ids)
        opened = Open(compatibility_key="key-1", prompts=((1,),), choices=(ChoiceStart(prompt=0, sampling=b""),),
                      created=1, stream=True)  # fmt: skip
        self._transport.write(_HEAD + encode_frame(opened))
        now = self._loop.time()
        self._timers = [self._loop.call_at(now, self._step, now), self._loop.call_at(now, self._alive, now)]

    def _step(self, due: float) -> None:
        if self._index == self._tokens:
            end = End(body=b"data: [DONE]\n\n", prompt_tokens=1, completion_tokens=self._tokens)
            self._transport.write(encode_frame(end))
            self._transport.close()
            return
        token = token_id(self._asked.body, 0, self._index)
        event = {"choices": [{"index": 0, "delta": {"content": f"{token} "}}], "made": time.monotonic()}
        events = b"data: " + msgspec.json.encode(event) + b"\n\n"
        step = Step(choice=0, index=self._index, ids=(token,), counters=ChoiceCounters(), events=events)
        self._transport.write(encode_frame(step))
        self._index += 1
        due += self._interval
        self._timers[0] = self._loop.call_at(due, self._step, due)

    def _alive(self, due: float) -> None:
        # An engine whose step number stays the same counts as hanging.
        self._transport.write(encode_frame(Alive(step=self._index, longest_step_seconds=0.01)))
        due += ALIVE_SECONDS
        self._timers[1] = self._loop.call_at(due, self._alive, due)


async def main(port: int, interval_seconds: float, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(interval_seconds, tokens), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
