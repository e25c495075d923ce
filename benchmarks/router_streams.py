"""A router under many streams: added latency, CPU and memory, and what the loss of a worker does to them.

Three stand-in workers send a scripted text at a steady rate. The same clients read it directly from a stand-in and
through the router; the difference is what the router adds. Then one of three stand-ins is killed: every stream must
end with its whole text.

    PYTHONPATH=worker:router:tests .venv/bin/python benchmarks/router_streams.py --out STEM
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import uvloop

from specdecode_worker.contract.internal_stream import INTERNAL_STREAMS, OpenStream, encode_document
from support.stand_in_worker import TOKEN, text_of

_ROOT = Path(__file__).parents[1]
_STAND_IN = Path(__file__).parent / "lean_stand_in.py"
_EVENT = re.compile(rb'"content":"(\d+ )"\}\}\],"made":([\d.]+)')
_BUCKET = re.compile(r'added_latency_seconds_bucket{le="([^"]+)",stage="write"} ([\d.e+]+)')
_RAMP_SECONDS = 4.0
"""Time in which all streams are opened, so that their chunks are spread evenly."""


@dataclass(slots=True)
class Stream(asyncio.Protocol):
    """Client of one stream."""

    request: bytes
    body: bytes
    ends_with: bytes
    done: asyncio.Future[None]
    count_from: float
    """Time from which latencies count: all streams are open by then."""
    latencies: list[float] = field(default_factory=list)
    chunks: int = 0
    gap: float = 0.0
    """Longest time between two chunks."""
    text: bytearray = field(default_factory=bytearray)
    _rest: bytes = b""
    _last: float = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._rest + data
        end = 0
        for match in _EVENT.finditer(data):
            end = match.end()
            self.text += match[1]
            if now > self.count_from:
                self.latencies.append(now - float(match[2]))
                self.gap = max(self.gap, now - (self._last or now))
            self.chunks += 1
            self._last = now
        self._rest = data[end:]
        if self.ends_with in self._rest and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Processes:
    """Stand-ins and router, ended with the block."""

    def __init__(self, interval_seconds: float, tokens: int) -> None:
        self.ports = [_free_port() for _ in range(4)]
        paths = os.pathsep.join(str(_ROOT / one) for one in ("worker", "router", "tests"))
        self._environment = {**os.environ, "PYTHONPATH": paths, "SPECDECODE_ADMIN_TOKEN": TOKEN}
        words = [[sys.executable, str(_STAND_IN), str(port), str(interval_seconds), str(tokens)]
                 for port in self.ports[1:]]  # fmt: skip
        urls = [f"--worker=http://127.0.0.1:{port}" for port in self.ports[1:]]
        words.append([sys.executable, "-m", "specdecode_router", "serve", "--port", str(self.ports[0]), *urls])
        self._running = [subprocess.Popen(one, env=self._environment, stderr=subprocess.DEVNULL) for one in words]

    def __enter__(self) -> Processes:
        for port in self.ports:
            _wait_for(port)
        time.sleep(1)  # the router reads the first reports
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def kill_worker(self) -> None:
        self._running[0].send_signal(signal.SIGKILL)

    def write_stage(self) -> dict[str, float]:
        """Return the share of frames that the router wrote to their client within a time of their receipt."""
        text = urlopen(f"http://127.0.0.1:{self.ports[0]}/metrics").read().decode()
        counts = {le: float(count) for le, count in _BUCKET.findall(text)}
        return {f"within_{le}_s": round(counts[le] / counts["+Inf"], 5) for le in ("0.0005", "0.001", "0.01")}

    def router_run_delay(self) -> float:
        """Return the seconds for which the router was ready to run while other processes had the cores."""
        return int(Path(f"/proc/{self._running[-1].pid}/schedstat").read_text().split()[1]) / 1e9

    def router_usage(self) -> tuple[float, int]:
        """Return CPU seconds and resident bytes of the router."""
        stat = Path(f"/proc/{self._running[-1].pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(stat[11]) + int(stat[12])
        return ticks / os.sysconf("SC_CLK_TCK"), int(stat[21]) * os.sysconf("SC_PAGE_SIZE")


async def run_streams(port: int, count: int, *, direct: bool, at_half: Any = None, seconds: float) -> list[Stream]:
    """Run ``count`` streams and return them. ``at_half`` is called in the middle."""
    loop = asyncio.get_running_loop()
    streams, count_from = [], time.monotonic() + _RAMP_SECONDS + 1
    for number in range(count):
        body = json.dumps({"messages": [{"role": "user", "content": f"{number}"}], "stream": True}).encode()
        streams.append(Stream(_request(body, direct), body, b"[DONE]", loop.create_future(), count_from))
    if at_half is not None:
        loop.call_later(_RAMP_SECONDS + seconds / 2, at_half)
    for stream in streams:
        await loop.create_connection(lambda made=stream: made, "127.0.0.1", port)
        await asyncio.sleep(_RAMP_SECONDS / count)
    await asyncio.wait([stream.done for stream in streams], timeout=seconds + 60)
    return streams


def _request(body: bytes, direct: bool) -> bytes:
    path, content = "/v1/chat/completions", body
    if direct:
        path, content = INTERNAL_STREAMS, encode_document(OpenStream(route=path, body=body, request_id="direct"))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def summary(streams: list[Stream], tokens: int) -> dict[str, Any]:
    """Return counts, latencies and gaps of some streams."""
    latencies = sorted(latency for stream in streams for latency in stream.latencies)
    gaps = sorted(stream.gap for stream in streams)
    complete = sum(stream.text.decode() == text_of(stream.body, tokens) for stream in streams)
    return {
        "streams": len(streams),
        "complete": complete,
        "chunks": sum(stream.chunks for stream in streams),
        "latency_ms": {f"p{p}": round(1000 * _percentile(latencies, p), 3) for p in (50, 90, 99)},
        "longest_gap_ms": {f"p{p}": round(1000 * _percentile(gaps, p), 1) for p in (50, 90, 99, 100)},
    }


def _percentile(values: list[float], percent: int) -> float:
    return values[min(len(values) * percent // 100, len(values) - 1)]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    interval, tokens = 1 / args.rate, int(args.rate * args.seconds)
    results: dict[str, Any] = {"streams": args.streams, "chunks_per_second_each": args.rate, "seconds": args.seconds,
                               "load_average": os.getloadavg()[0]}  # fmt: skip
    for name in ("direct", "router", "worker killed"):
        with Processes(interval, tokens) as processes:
            direct = name == "direct"
            port = processes.ports[1] if direct else processes.ports[0]
            count = args.streams // 3 if direct else args.streams
            before, _ = processes.router_usage()
            at_half = processes.kill_worker if name == "worker killed" else None
            streams = await run_streams(port, count, direct=direct, at_half=at_half, seconds=args.seconds)
            after, resident = processes.router_usage()
            results[name] = summary(streams, tokens)
            if not direct:
                chunks = results[name]["chunks"]
                results[name]["router_run_delay_s"] = round(processes.router_run_delay(), 2)
                results[name]["router_write_stage"] = processes.write_stage()
                results[name]["router_cpu_us_per_chunk"] = round(1e6 * (after - before) / chunks, 1)
                results[name]["router_resident_mb"] = round(resident / 1e6, 1)
    return results


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    streams, rate = results["streams"], results["chunks_per_second_each"]
    lines = [f"{streams} streams of {rate:g} chunks/s over three stand-ins.", "",
             "| run | complete | p50 ms | p99 ms | longest gap p99 ms | CPU us/chunk | run delay s | MB |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in ("direct", "router", "worker killed"):
        one = results[name]
        usage = [one.get(f"router_{key}", "-") for key in ("cpu_us_per_chunk", "run_delay_s", "resident_mb")]
        cells = [name, f"{one['complete']}/{one['streams']}", one["latency_ms"]["p50"], one["latency_ms"]["p99"],
                 one["longest_gap_ms"]["p99"], *usage]  # fmt: skip
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=5.0, help="chunks a second of each stream")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", metavar="STEM", help="writes STEM.json and STEM.md")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    results = uvloop.run(measure(args))
    print(table(results))
    if args.out:
        Path(args.out + ".json").write_text(json.dumps(results, indent=1) + "\n")
        Path(args.out + ".md").write_text(table(results))
    return (
        0 if all(results[name]["complete"] == results[name]["streams"] for name in ("router", "worker killed")) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
