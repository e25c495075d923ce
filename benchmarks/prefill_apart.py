"""Compare the token gaps of running streams while long prompts arrive, with and without a prefill worker.

    python benchmarks/prefill_apart.py --out out/prefill_apart.json        # both arms in turn, about 10 minutes

Each arm has two processes of the embedded model, each pinned to a core of its own, and the same load: streams that run
all the time, and long prompts at fixed times. ``together``: two ordinary workers, each with half of the streams and of
the prompts. ``apart``: a worker with all of them, which asks a prefill worker for the blocks of long prompts. The gaps
between the tokens of streams are recorded, the longest ones with the time since the last long prompt, so that a
time-line shows what an arm waits for. The client runs on the same machine; use one with a core to spare, and nothing
else on it.

``bandwidth_for_ttft`` is computed: bytes of a prompt's blocks over the time by which its first token comes later
together than apart, where the transfer over loopback costs next to nothing. From this bandwidth on, the first token
comes earlier apart too, even if nothing of the transfer overlaps with the computation. None: it never does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--streams", type=int, default=4, help="streams that run all the time")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=90.0, help="duration of one arm")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm, in turn")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            runs[arm].append(run(arm, args))
            print(arm, {name: value for name, value in runs[arm][-1].items() if name != "gaps"}, flush=True)
    figures = {arm: {name: median([one[name] for one in some]) for name in FIGURES} for arm, some in runs.items()}
    together, apart = figures["together"], figures["apart"]
    saved = together["ttft_seconds"] - apart["ttft_seconds"]
    document = {
        **described(),
        "load": {"streams": args.streams, "prompt_tokens": args.prompt_tokens, "every_seconds": args.every},
        "median_of_runs": figures,
        "itl_p99_apart_over_together": round(apart["itl_p99_seconds"] / together["itl_p99_seconds"], 3),
        "bandwidth_for_ttft": round(apart["bytes_per_prompt"] / saved) if saved > 0 else None,
        "runs": runs,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: value for name, value in document.items() if name != "runs"}, indent=2))


FIGURES = ("itl_p50_seconds", "itl_p99_seconds", "ttft_seconds", "stream_tokens_per_second", "bytes_per_prompt")


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
        yield {"log": log, "public": urls[0][1], "admin": urls[1][1]}  # type: ignore[index]
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
    firsts: list[float] = []
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
            asked.append(
                asyncio.create_task(long_prompt(session, workers[number % len(workers)], args, number, firsts))
            )
            number += 1
            await asyncio.sleep(args.every)
        await asyncio.gather(*streams, *asked)
        after = [await report(session, one) for one in workers]
    moved = {name: sum(b[name] - a[name] for a, b in zip(before, after, strict=True)) for name in COUNTERS}
    ordered = sorted(gap for _, gap in gaps)
    return {
        "itl_p50_seconds": round(ordered[len(ordered) // 2], 4),
        "itl_p99_seconds": round(ordered[int(len(ordered) * 0.99)], 4),
        "ttft_seconds": round(median(firsts), 4),
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


async def stream(
    session: aiohttp.ClientSession, one: dict[str, Any], number: int, ends: float, gaps: list[tuple[float, float]]
) -> None:
    """Read streams one after the other, and record when each piece came and after what time."""
    turn = 0
    while time.monotonic() < ends:
        turn += 1
        body = {"prompt": f"Stream {number}, turn {turn}. Write a long story about a ship.", "max_tokens": 300,
                "temperature": 0.7, "seed": 100 * number + turn, "ignore_eos": True, "stream": True}  # fmt: skip
        last = None
        async with session.post(one["public"] + "/v1/completions", json={"model": NAME, **body}) as answer:
            async for line in answer.content:
                now = time.monotonic()
                if now >= ends:
                    return
                if not line.startswith(b"data: {"):
                    continue
                if last is not None:
                    gaps.append((now, now - last))
                last = now


async def long_prompt(
    session: aiohttp.ClientSession, one: dict[str, Any], args: argparse.Namespace, number: int, firsts: list[float]
) -> None:
    """Send a long prompt that no cache knows, and record the time to its first token."""
    ids = [1000 + (7919 * number + 31 * k * k + k) % 40000 for k in range(args.prompt_tokens)]
    body = {"model": NAME, "prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    async with session.post(one["public"] + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                firsts.append(time.monotonic() - began)
                break
        await answer.read()


if __name__ == "__main__":
    main()
