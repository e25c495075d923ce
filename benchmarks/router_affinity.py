"""Prefix hits and TTFT of a chat workload behind a router, by placement policy: affinity, round robin, least loaded.

Real workers with the embedded model, and one router for each policy before the same workers. The same conversations
with the same think times run through one router after the other, in rounds of opposite order, so that a change of the
machine's load does not favour a policy. Every run has a cache salt of its own, and so begins with an empty cache.
Answers are the same under every policy, because text depends on the prompt and the seed alone.

    PYTHONPATH=worker:router:tests .venv/bin/python benchmarks/router_affinity.py --out STEM
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from machine import described
from placement_policies import POLICIES, policy_of

from specdecode_router.discovery.static import StaticDiscovery
from specdecode_router.process import running_router
from specdecode_router.settings import RouterSettings
from specdecode_worker.contract import Env
from specdecode_worker.training import prompts
from support.worker_process import WorkerProcess, real

TOKEN = "token-of-the-benchmark"
SYSTEM = "You are a patient assistant of a small town library. Answer in one short sentence, and ask back if needed."
"""System message that all conversations share."""
ANSWER_TOKENS = 16
WORDS_PER_TURN = 90


@dataclass(slots=True)
class Turn:
    """Measurements of one request."""

    turn: int
    ttft: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Conversation:
    """Messages of one client, its think times, and what its turns measured."""

    questions: list[str]
    pauses: list[float]
    seed: int
    salt: str
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    turns: list[Turn] = field(default_factory=list)

    async def run(self, client: aiohttp.ClientSession) -> None:
        """Ask one question after the other."""
        for question, pause in zip(self.questions, self.pauses, strict=True):
            await asyncio.sleep(pause)
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": await self._ask(client)})

    async def _ask(self, client: aiohttp.ClientSession) -> str:
        body = {"model": "m", "messages": self.messages, "max_tokens": ANSWER_TOKENS, "temperature": 0.7,
                "seed": self.seed, "cache_salt": self.salt, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        began, first, text, usage = time.monotonic(), 0.0, "", {}
        async with client.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if piece and not first:
                    first = time.monotonic()
                text += piece
                usage = event.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.turns.append(Turn(len(self.turns), (first or time.monotonic()) - began, usage["prompt_tokens"], cached))
        return text


def conversations(args: argparse.Namespace, number: int, salt: str) -> list[Conversation]:
    """Return the workload of a round, the same for every policy."""
    rng = random.Random(f"round {number}")
    return [
        Conversation(
            [_question(rng) for _ in range(args.turns)],
            [rng.uniform(0, 2 * args.think), *(rng.expovariate(1 / args.think) for _ in range(args.turns - 1))],
            seed,
            salt,
        )
        for seed in range(args.conversations)
    ]


def _question(rng: random.Random) -> str:
    text = ""
    while len(text.split()) < WORDS_PER_TURN:
        text += prompts.draw(rng).text + " "
    return text.strip()


@contextlib.contextmanager
def running_workers(args: argparse.Namespace, folder: Path) -> Iterator[list[WorkerProcess]]:
    """Yield ready workers with empty caches."""
    flags = ["--served-model-name", "m", "--device", "cpu", "--threads", "1", "--method", "none"]
    flags += ["--max-num-seqs", "4", "--max-model-len", "2048", "--kv-cache-tokens", str(args.kv_cache_tokens)]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(real(flags, folder / f"worker-{number}.log", {Env.admin_token: TOKEN}))
            for number in range(args.workers)
        ]
        for worker in workers:
            worker.wait_ready()
        yield workers


@contextlib.asynccontextmanager
async def running_policy(policy: str, workers: list[WorkerProcess], folder: Path) -> AsyncIterator[str]:
    """Yield the URL of a router process with the policy."""
    log = folder / f"{policy}.log"
    words = [sys.executable, __file__, "--serve", policy, *(worker.admin for worker in workers)]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        while not (match := re.search(r"serving on (\S+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            await asyncio.sleep(0.05)
        yield match[1]
    finally:
        process.terminate()
        process.wait()


async def serve(policy: str, urls: list[str]) -> None:
    """Run a router with the policy, until it is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    # A second attempt would compute a prompt twice. On a busy machine steps are long, and no worker is at fault.
    patient = RouterSettings(min_silence_seconds=300, max_silence_seconds=600, open_seconds=300)
    async with running_router(patient, lambda: (TOKEN,), StaticDiscovery(urls), listener) as state:
        state.placement.policy = policy_of(policy)
        await asyncio.sleep(3)  # the reports of all workers were read
        print(f"serving on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await asyncio.Event().wait()


async def run_round(args: argparse.Namespace, number: int, policy: str, url: str) -> list[Turn]:
    """Run the conversations of a round through the router of one policy."""
    workload = conversations(args, number, f"{number}-{policy}")
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as client:
        await asyncio.gather(*(one.run(client) for one in workload))
    return [turn for one in workload for turn in one.turns]


async def placements(url: str) -> dict[str, int]:
    """Return the choices of a router by outcome."""
    async with aiohttp.ClientSession(url) as client, client.get("/metrics") as response:
        counts = re.findall(r'placements_total{outcome="(\w+)"} (\S+)', await response.text())
    return {outcome: int(float(count)) for outcome, count in counts}


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Return prefix hits and TTFT of some requests."""
    later = [turn for turn in turns if turn.turn]
    ttfts = sorted(turn.ttft for turn in turns)
    prompt, cached = (sum(getattr(turn, name) for turn in turns) for name in ("prompt_tokens", "cached_tokens"))
    return {
        "requests": len(turns),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "prefix_hit_rate": round(cached / prompt, 4),
        "ttft_mean_ms": round(1000 * sum(ttfts) / len(ttfts), 1),
        "ttft_mean_ms_after_first_turn": round(1000 * sum(turn.ttft for turn in later) / len(later), 1),
        "ttft_p50_ms": round(1000 * ttfts[len(ttfts) // 2], 1),
        "ttft_p90_ms": round(1000 * ttfts[len(ttfts) * 9 // 10], 1),
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["| policy | prompt tokens from the cache | mean TTFT ms | p50 | p90 | mean after the first turn |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, one in results["policies"].items():
        ttft = [f"{one[key]:.0f}" for key in ("ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms",
                                              "ttft_mean_ms_after_first_turn")]  # fmt: skip
        lines.append(f"| {name} | {one['prefix_hit_rate']:.0%} | {' | '.join(ttft)} |")
    return "\n".join(lines) + "\n"


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, in each of them all policies one after the other."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "serve", "urls")}
    turns: dict[str, list[Turn]] = {policy: [] for policy in POLICIES}
    loads = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = stack.enter_context(running_workers(args, folder))
        urls = {policy: await stack.enter_async_context(running_policy(policy, workers, folder)) for policy in POLICIES}
        for number in range(args.rounds):
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                turns[policy] += await run_round(args, number, policy, urls[policy])
                loads.append(round(os.getloadavg()[0], 1))
                print(number, policy, json.dumps(summary(turns[policy])), f"load {loads[-1]}", flush=True)
        outcomes = {policy: await placements(url) for policy, url in urls.items()}
    policies = {policy: {**summary(turns[policy]), "placements": outcomes[policy]} for policy in POLICIES}
    return {**described(), "threads": 1, **settings, "answer_tokens": ANSWER_TOKENS, "load_averages": loads,
            "policies": policies}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--think", type=float, default=6.0, help="mean seconds between two turns")
    parser.add_argument("--kv-cache-tokens", type=int, default=4096, help="of each worker")
    parser.add_argument("--out", metavar="STEM", help="writes STEM.json and STEM.md")
    parser.add_argument("--serve", choices=POLICIES, help=argparse.SUPPRESS)
    parser.add_argument("urls", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(args.serve, args.urls))
        return 0
    results = uvloop.run(measure(args))
    print(table(results))
    if args.out:
        Path(args.out + ".json").write_text(json.dumps(results, indent=1) + "\n")
        Path(args.out + ".md").write_text(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
