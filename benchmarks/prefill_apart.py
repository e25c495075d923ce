"""Compare the token gaps of running streams while long prompts arrive, with and without a prefill worker.

    python benchmarks/prefill_apart.py --out out/prefill_apart.json        # both arms in turn, about 10 minutes
    python benchmarks/prefill_apart.py --drain --out out/drain.json        # streams that move, about 3 minutes

Each arm has two processes of the embedded model, each pinned to a core of its own, and the same load: streams that run
all the time, and long prompts at fixed times. ``together``: two ordinary workers, each with half of the streams and of
the prompts. ``apart``: a worker with all of them, which asks a prefill worker for the blocks of long prompts. The gaps
between the tokens of streams are recorded, the longest ones with the time since the last long prompt, so that a
time-line shows what an arm waits for; ``itl_p99_seconds`` is of gaps while a long prompt waits for its first token,
``itl_p99_of_all_seconds`` that of all. The client runs on the same machine; use one with a core to spare, and nothing
else on it.

``bandwidth_for_ttft`` is computed: bytes of a prompt's blocks over the time by which its first token comes later
together than apart, where the transfer over loopback costs next to nothing. From this bandwidth on, the first token
comes earlier apart too, even if nothing of the transfer overlaps with the computation. None: it never does.

``--drain`` has a router before two workers, each with half of the streams, whose prompts are long. One worker drains,
and the other continues its streams: ``moved`` with the blocks of the first, ``computed`` without. The figures are the
longest gap of the streams that move and of those that stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from machine import described

MODEL = "embedded://smollm2-135m-instruct"
NAME = "smollm2-135m-instruct"
TOKEN = "token-of-the-benchmark"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ARMS = ("together", "apart")
DRAIN_ARMS = ("computed", "moved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--streams", type=int, default=4, help="streams that run all the time")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=90.0, help="duration of one arm")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm, in turn")
    parser.add_argument("--drain", action="store_true", help="measure streams that move to another worker instead")
    args = parser.parse_args()
    arms, one_run = (DRAIN_ARMS, drain) if args.drain else (ARMS, run)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(args.rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            runs[arm].append(one_run(arm, args))
            print(arm, {name: value for name, value in runs[arm][-1].items() if name != "gaps"}, flush=True)
    names = DRAIN_FIGURES if args.drain else FIGURES
    figures = {arm: {name: median([one[name] for one in some]) for name in names} for arm, some in runs.items()}
    document = {
        **described(),
        "load": {"streams": args.streams, "prompt_tokens": args.prompt_tokens, "every_seconds": args.every},
        "median_of_runs": figures,
        **({} if args.drain else compared(figures["together"], figures["apart"])),
        "runs": runs,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: value for name, value in document.items() if name != "runs"}, indent=2))


def compared(together: dict[str, Any], apart: dict[str, Any]) -> dict[str, Any]:
    """Return ratio and bandwidth of two arms."""
    saved = together["ttft_seconds"] - apart["ttft_seconds"]
    return {
        "itl_p99_apart_over_together": round(apart["itl_p99_seconds"] / together["itl_p99_seconds"], 3),
        "bandwidth_for_ttft": round(apart["bytes_per_prompt"] / saved) if saved > 0 else None,
    }


FIGURES = (
    "itl_p50_seconds",
    "itl_p99_seconds",
    "itl_p99_of_all_seconds",
    "ttft_seconds",
    "stream_tokens_per_second",
    "bytes_per_prompt",
)


def run(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the workers of an arm, load them, and return its figures."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        if arm == "apart":
            flags = ("--role", "prefill", "--block-port", "0")
            prefill = stack.enter_context(worker(args.cores[0], Path(folder, "prefill.log"), flags))
            block_port = re.search(r"block port: (\d+)", prefill["log"].read_text())
            assert block_port, "a prefill worker listens"
            peer = ("--prefill", f"127.0.0.1:{block_port[1]}")
            workers = [stack.enter_context(worker(args.cores[1], Path(folder, "worker.log"), peer))]
        else:
            logs = [Path(folder, f"{core}.log") for core in args.cores]
            workers = [stack.enter_context(worker(core, log)) for core, log in zip(args.cores, logs, strict=True)]
        return asyncio.run(load(workers, args))


@contextmanager
def worker(core: int, log: Path, flags: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a worker that is ready, pinned to a core: its log and the URLs of its ports."""
    listening = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
    size = ["--threads", "1", "--max-num-seqs", "8", "--kv-cache-tokens", "24576"]
    words = [sys.executable, "-m", "specdecode_worker", "serve", "--model", MODEL, *listening, *size, *flags]
    environment = {**os.environ, "SPECDECODE_ADMIN_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(["taskset", "-c", str(core), *words], stdout=out, stderr=out, env=environment)
    try:
        while not is_ready(log.read_text()):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        text = log.read_text()
        urls = [re.search(rf"{name} port: (\S+)", text) for name in ("public", "admin")]
        yield {"process": process, "log": log, "public": urls[0][1], "admin": urls[1][1]}  # type: ignore[index]
    finally:
        process.terminate()
        process.wait(60)


def is_ready(log: str) -> bool:
    """Return whether the worker with this log is ready."""
    public = re.search(r"public port: (\S+)", log)
    if public is None:
        return False
    try:
        with urllib.request.urlopen(f"{public[1]}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def load(workers: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Run streams and long prompts for the time of an arm."""
    gaps: list[tuple[float, float]] = []
    waits: list[tuple[float, float]] = []
    prompts: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        # What is measured decides whether a prompt is sent away, so each worker computes one before the load.
        await asyncio.gather(*(long_prompt(session, one, args, -1 - k, []) for k, one in enumerate(workers)))
        before = [await report(session, one) for one in workers]
        ends = time.monotonic() + args.seconds
        streams = [asyncio.create_task(stream(session, workers[k % len(workers)], k, ends, gaps))
                   for k in range(args.streams)]  # fmt: skip
        await asyncio.sleep(args.every / 2)
        asked, number = [], 0
        while time.monotonic() < ends - args.every:
            prompts.append(time.monotonic())
            asked.append(asyncio.create_task(long_prompt(session, workers[number % len(workers)], args, number, waits)))
            number += 1
            await asyncio.sleep(args.every)
        await asyncio.gather(*streams, *asked)
        after = [await report(session, one) for one in workers]
    moved = {name: sum(b[name] - a[name] for a, b in zip(before, after, strict=True)) for name in COUNTERS}
    ordered = sorted(gap for _, gap in gaps)
    meanwhile = sorted(gap for at, gap in gaps if any(sent < at < first + gap for sent, first in waits))
    return {
        "itl_p50_seconds": round(ordered[len(ordered) // 2], 4),
        "itl_p99_seconds": round(meanwhile[int(len(meanwhile) * 0.99)], 4),
        "itl_p99_of_all_seconds": round(ordered[int(len(ordered) * 0.99)], 4),
        "ttft_seconds": round(median(first - sent for sent, first in waits), 4),
        "stream_tokens_per_second": round(len(gaps) / args.seconds, 1),
        "bytes_per_prompt": round(moved["remote_prefill_bytes"] / max(number, 1)),
        "long_prompts": number,
        **moved,
        "gaps": [[round(at - max((p for p in prompts if p <= at), default=at), 3), round(gap, 4)]
                 for at, gap in gaps if gap >= ordered[int(len(ordered) * 0.95)]],
    }  # fmt: skip


COUNTERS = ("remote_prefills", "remote_prefill_failures", "remote_prefill_tokens", "remote_prefill_bytes")


async def report(session: aiohttp.ClientSession, one: dict[str, Any]) -> dict[str, Any]:
    async with session.get(one["admin"] + "/v1/report", headers=HEADERS) as answer:
        return await answer.json()  # type: ignore[no-any-return]


async def pieces(session: aiohttp.ClientSession, url: str, **fields: Any) -> AsyncGenerator[float, None]:
    """Stream a completion of the base URL, and yield the time of each piece of its text."""
    body = {"model": NAME, "ignore_eos": True, "stream": True, **fields}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield time.monotonic()


async def stream(
    session: aiohttp.ClientSession, one: dict[str, Any], number: int, ends: float, gaps: list[tuple[float, float]]
) -> None:
    """Read streams one after the other, and record when each piece came and after what time."""
    for turn in itertools.count(1):
        prompt = f"Stream {number}, turn {turn}. Write a long story about a ship."
        seed, last = 100 * number + turn, None
        fields = {"prompt": prompt, "max_tokens": 300, "temperature": 0.7, "seed": seed}
        async with contextlib.aclosing(pieces(session, one["public"], **fields)) as times:
            async for now in times:
                if now >= ends:
                    return
                if last is not None:
                    gaps.append((now, now - last))
                last = now


async def long_prompt(
    session: aiohttp.ClientSession,
    one: dict[str, Any],
    args: argparse.Namespace,
    number: int,
    waits: list[tuple[float, float]],
) -> None:
    """Send a long prompt that no cache knows, and record when it was sent and when its first token came."""
    began = time.monotonic()
    asked = pieces(session, one["public"], prompt=unknown_ids(args, number), max_tokens=4, temperature=0)
    first, *_ = [now async for now in asked]
    waits.append((began, first))


def unknown_ids(args: argparse.Namespace, number: int) -> list[int]:
    """Return a prompt that no cache knows, another one for each number."""
    return [1000 + (7919 * number + 31 * k * k + k) % 40000 for k in range(args.prompt_tokens)]


# Streams that move.

DRAIN_FIGURES = ("longest_gap_of_moved_seconds", "longest_gap_of_others_seconds", "moved_bytes")


def drain(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start two workers and a router, drain one worker amid its streams, and return the longest gaps."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        workers = []
        for core in args.cores:
            flags = ("--block-port", str(free_port())) if arm == "moved" else ()
            workers.append(stack.enter_context(worker(core, Path(folder, f"{core}.log"), flags)))
        token = Path(folder, "token")
        token.write_text(TOKEN)
        port = free_port()
        words = [
            sys.executable,
            "-m",
            "specdecode_router",
            "serve",
            "--port",
            str(port),
            "--admin-token-file",
            str(token),
        ]
        words += [word for one in workers for word in ("--worker", one["admin"])]
        with Path(folder, "router.log").open("wb") as out:
            router = subprocess.Popen(words, stdout=out, stderr=out)
        stack.callback(router.wait, 60)
        stack.callback(router.terminate)
        return asyncio.run(moved_streams(workers, f"http://127.0.0.1:{port}", args))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def moved_streams(workers: Sequence[dict[str, Any]], url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run streams through a router, drain the first worker when all have begun, and return their gaps after that."""
    times: list[list[float]] = [[] for _ in range(args.streams)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for _ in range(100):  # until the router listens and knows its workers
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        break
            await asyncio.sleep(0.2)
        streams = [asyncio.create_task(routed(session, url, args, k, times[k])) for k in range(args.streams)]
        while not all(len(one) > 10 for one in times):
            await asyncio.sleep(0.1)
        running = [(await report(session, one))["running"] for one in workers]
        drained = time.monotonic()
        workers[0]["process"].terminate()
        await asyncio.gather(*streams)
        after = await report(session, workers[1])
    longest = sorted(max(b - a for a, b in itertools.pairwise(one) if b > drained) for one in times)
    moved = longest[len(longest) - running[0] :]
    return {
        "longest_gap_of_moved_seconds": round(median(moved), 4),
        "longest_gap_of_others_seconds": round(median(longest[: running[1]]), 4),
        "moved_bytes": after["remote_prefill_bytes"],
        "running": running,
        "gaps": [round(gap, 4) for gap in longest],
    }


async def routed(
    session: aiohttp.ClientSession, url: str, args: argparse.Namespace, number: int, times: list[float]
) -> None:
    """Read one stream with a long prompt, and record when its pieces came."""
    fields = {"prompt": unknown_ids(args, number), "max_tokens": 400, "temperature": 0.7, "seed": number}
    async for now in pieces(session, url, **fields):
        times.append(now)


if __name__ == "__main__":
    main()
