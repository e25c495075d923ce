"""Soak test: open-loop load with disconnecting and misbehaving clients while plan and draft are swapped.

It lasts 20 seconds; 300 with ``make proofs P=soak``. No request may fail or get stuck, equal requests
must get equal texts at all times, memory must stay constant, and every block must be freed.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import Plan, Route, TreeShape
from support import small_model
from support.processes import resident_bytes
from support.tiers import by_effort
from support.worker_process import WorkerProcess, ready, real

SECONDS = by_effort(quick=20.0, full=20.0, nightly=300.0)
LONG = SECONDS >= 60
MOST_RATE = 60 if LONG else 16
"""Requests a second in the middle of the run. A long run reaches the maximum number of concurrent clients."""
MOST_CLIENTS = 64
SHARES = {"stream": 0.4, "whole": 0.4, "disconnect": 0.1, "oversized": 0.05, "garbage": 0.05}
"""Behaviour of clients: the last two must be refused, and those that disconnect read the beginning of an answer."""
PROMPTS = [("The same beginning, again and again. " * 4)[: 1 + 29 * i] + str(i) for i in range(6)]
"""1 to 150 tokens, one per byte, some of which share a prefix."""
SWAP_SECONDS = min(5.0, SECONDS / 6)
SHAPES = ("chain:3", "none", "tree:4,2,1", "chain:6", "tree:8", "chain:1")

pytestmark = pytest.mark.timeout(SECONDS * 3 + 400)


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    small_model.write_draft(folder, seed=2)
    return folder


@pytest.fixture(scope="module")
def worker(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    # fp32, because in bf16 rounding depends on the batch size, and texts diverge at near ties.
    flags = [*small_model.flags(*folders), "--max-num-seqs", "16"]
    with ready(real(flags, tmp_path_factory.mktemp("log") / "log")) as started:
        yield started


class Swaps(threading.Thread):
    """Thread that pushes another plan and another draft every few seconds.

    ``refused`` collects the pushes that the worker did not accept.
    """

    def __init__(self, worker: WorkerProcess, drafts: tuple[Path, Path]) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.plans = self.drafts = 0
        self.refused: list[str] = []
        self._worker, self._drafts = worker, drafts

    def run(self) -> None:
        while not self.done.wait(SWAP_SECONDS / 2):
            if (self.plans + self.drafts) % 2:
                self._put(Route.draft, {"method": "eagle3", "uri": f"file://{self._drafts[self.drafts % 2]}"})
                self.drafts += 1
            else:
                shape = TreeShape.parse(SHAPES[self.plans % len(SHAPES)])
                plan = Plan(version=self.plans + 1, initial=shape, max_depth=6, top_k=8, explore=0.1)
                self._put(Route.plan, plan.model_dump(mode="json"))
                self.plans += 1

    def _put(self, route: str, body: dict[str, Any]) -> None:
        answer = self._worker.call_admin(route, "PUT", json=body, timeout=60)
        if answer.status_code not in (200, 202):
            self.refused.append(f"{route}: {answer.status_code} {answer.text}")


class Load:
    """Open-loop load: Poisson arrivals whose rate rises and falls again, of few different requests that repeat."""

    def __init__(self, url: str, seed: int) -> None:
        self.problems: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.texts: dict[str, set[str]] = defaultdict(set)
        """Different answers to equal requests."""
        self.answered: Counter[str] = Counter()
        self.most_concurrent = self._concurrent = 0
        # A connection per request, as many separate users have.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False)
        self._places, self._random = asyncio.Semaphore(MOST_CLIENTS), random.Random(seed)

    async def run(self, seconds: float) -> None:
        began = time.monotonic()
        async with self._client, asyncio.TaskGroup() as sending:
            while (second := time.monotonic() - began) < seconds:
                rate = MOST_RATE - (MOST_RATE - 1) * abs(2 * second / seconds - 1)
                await asyncio.sleep(self._random.expovariate(rate))
                (kind,) = self._random.choices(tuple(SHARES), tuple(SHARES.values()))
                sending.create_task(self._send(kind, self._body(kind)))

    def _body(self, kind: str) -> dict[str, Any]:
        prompt = PROMPTS[self._random.randrange(len(PROMPTS))]
        sampled = self._random.random() < 0.5
        return {
            "model": "small",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1 << 20 if kind == "oversized" else 2 << self._random.randrange(1, 6),
            "temperature": 0.8 if sampled else 0.0,
            "seed": self._random.randrange(2) if sampled else 0,
            "stream": kind in ("stream", "disconnect"),
        }

    async def _send(self, kind: str, body: dict[str, Any]) -> None:
        async with self._places:
            self._concurrent += 1
            self.most_concurrent = max(self.most_concurrent, self._concurrent)
            self.kinds[kind] += 1
            try:
                text = await self._text(kind, body)
            except (httpx.HTTPError, AssertionError) as error:
                self.problems.append(f"{kind}: {type(error).__name__}: {error}")
            else:
                if text is not None:
                    key = json.dumps({**body, "stream": None})
                    self.texts[key].add(text)
                    self.answered[key] += 1
            self._concurrent -= 1

    async def _text(self, kind: str, body: dict[str, Any]) -> str | None:
        """Return the whole text of an answer; None if there is none. Fail for an answer that is not as it must be."""
        content = b'{"model": ' if kind == "garbage" else json.dumps(body).encode()
        pieces: list[str] = []
        async with self._client.stream("POST", "/v1/chat/completions", content=content) as answer:
            if answer.status_code != 200 or not body["stream"]:
                whole = (await answer.aread()).decode()
                expected = (400, 429) if kind in ("oversized", "garbage") else (200, 429)
                assert answer.status_code in expected, f"{answer.status_code}: {whole}"
                return json.loads(whole)["choices"][0]["message"]["content"] if answer.status_code == 200 else None
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "".join(pieces)
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    pieces += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
                if kind == "disconnect" and len(pieces) > 3:
                    return None
        raise AssertionError("the stream broke off before [DONE]")


def load(worker: WorkerProcess, seconds: float, seed: int) -> Load:
    async def run() -> Load:
        load = Load(worker.public, seed)
        await load.run(seconds)
        return load

    return asyncio.run(run())


def test_soak_has_no_failures_or_leaks(worker: WorkerProcess, folders: tuple[Path, Path], other_draft: Path) -> None:
    load(worker, min(SECONDS / 4, 20), seed=1)  # warm-up: one-time allocations happen here
    before = [resident_bytes(pid) for pid in worker.pids]
    swaps = Swaps(worker, (folders[1], other_draft))
    swaps.start()
    sent = load(worker, SECONDS, seed=2)
    swaps.done.set()
    swaps.join(60)
    print(f"{sent.kinds}, {sent.most_concurrent} at once, {swaps.plans} plans, {swaps.drafts} drafts")
    assert sent.problems == []
    assert [texts for texts in sent.texts.values() if len(texts) > 1] == []
    assert sent.most_concurrent == MOST_CLIENTS or not LONG
    assert sum(count > 1 for count in sent.answered.values()) > 10, "there must be equal requests to compare"
    assert sent.kinds.keys() == SHARES.keys()
    assert swaps.refused == []
    assert min(swaps.plans, swaps.drafts) >= 2
    worker.wait_until(lambda: (now := worker.report()).running + now.waiting == 0)
    assert worker.report().kv_tokens_used == 0, "blocks were not returned"
    after = [resident_bytes(pid) for pid in worker.pids]
    assert all(now < 1.1 * then + 40 * 2**20 for now, then in zip(after, before, strict=True)), (before, after)
