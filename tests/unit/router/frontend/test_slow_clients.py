"""A client that reads 1 KB a second: its stream takes bounded memory, and the other clients notice nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from support.router_harness import RouterUnderTest, router_over
from support.stand_in_worker import Script, text_of

CHAT = "/v1/chat/completions"
SLOW_CLIENTS = 4
FAST_CLIENTS = 3
EVENT_BYTES = 4000
UNSENT_BYTES = 32 * 1024
TOKENS = 600


def body(**fields: object) -> bytes:
    return json.dumps({"messages": [], "stream": True, **fields}).encode()


async def read_slowly(port: int, sent: bytes) -> None:
    """Read 1 KB a second of a stream until cancelled."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    with raw:
        await loop.sock_connect(raw, ("127.0.0.1", port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(sent)
        await loop.sock_sendall(raw, head + sent)
        while await loop.sock_recv(raw, 100):
            await asyncio.sleep(0.1)


async def write_p99(router: RouterUnderTest) -> float:
    """Return the 99th percentile of the times between two events of fast clients, in seconds."""
    gaps: list[float] = []

    async def read(number: int) -> None:
        sent = body(user=str(number))
        async with router.client.post(CHAT, data=sent) as response:
            content, last = b"", 0.0
            async for line in response.content:
                now = time.monotonic()
                if line.startswith(b"data: "):
                    if last:
                        gaps.append(now - last)
                    last = now
                content += line
        texts = [json.loads(one.removeprefix(b"data: ")) for one in content.split(b"\n\n")[1:-2]]
        assert "".join(one["choices"][0]["delta"]["content"] for one in texts) == text_of(sent, TOKENS)

    await asyncio.gather(*(read(number) for number in range(FAST_CLIENTS)))
    return sorted(gaps)[int(0.99 * len(gaps))]


@pytest.mark.slow
async def test_slow_clients_take_bounded_memory_and_delay_no_others() -> None:
    script = Script(tokens=TOKENS, interval_seconds=0.005, event_bytes=EVENT_BYTES)
    async with router_over(script, max_unsent_bytes=UNSENT_BYTES, write_timeout_seconds=600) as router:
        worker = router.workers[0]
        alone = await write_p99(router)
        whole = worker.sent_bytes / FAST_CLIENTS
        worker.sent_bytes = 0
        slow = [asyncio.create_task(read_slowly(router.port, body(user=f"slow-{n}"))) for n in range(SLOW_CLIENTS)]
        async with asyncio.timeout(30):
            while worker.running < SLOW_CLIENTS:
                await asyncio.sleep(0.01)
        delayed = await write_p99(router)
        taken = (worker.sent_bytes - FAST_CLIENTS * whole) / SLOW_CLIENTS
        print(f"p99 between two events: {1000 * alone:.1f} ms alone, {1000 * delayed:.1f} ms with slow clients; "
              f"{taken / 1024:.0f} KB taken of a stream of {whole / 1024:.0f} KB")  # fmt: skip
        assert not any(one.done() for one in slow), "they still read"
        assert whole > 2e6
        assert taken < 0.5 * whole, "the rest stays at the worker"
        assert delayed < 2 * alone + 0.1
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        async with asyncio.timeout(10):
            while worker.running:
                await asyncio.sleep(0.01)
