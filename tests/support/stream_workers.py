"""Workers in this process that serve internal streams, and the check that a request continues on another one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from specdecode_worker.contract import Plan, SyntheticKnobs, TreeShape, WorkerConfig
from specdecode_worker.contract.internal_stream import OpenStream
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.server.admission import Model, ReloadedSecrets, Scope
from specdecode_worker.server.listening import GracefulShutdown, Lifecycle
from specdecode_worker.server.routes.admin import admin_app
from specdecode_worker.server.service import Service
from specdecode_worker.server.tools import Tokenizer
from support.internal_client import Journal, all_of, answer_of
from support.worker.services import client_of

TOKEN = "token-of-the-tests"


@dataclass
class StreamWorker:
    """A worker in this process with an engine process of its own."""

    service: Service
    client: httpx.AsyncClient

    async def close(self) -> None:
        """End its processes."""
        self.service.close()
        await self.service.engine.close()


async def start_worker(config: WorkerConfig, folder: Path, shape: str) -> StreamWorker:
    """Start a worker whose drafts have a fixed shape. It must be closed."""
    plan = Plan(uid="uid-1", version=1, initial=TreeShape.parse(shape), max_depth=4, explore=0, guard=False)
    knobs = SyntheticKnobs(acceptance=(0.8, 0.7)) if shape != "none" else None
    engine = EngineClient(config, plan, knobs)
    service = Service(config, engine, Lifecycle(), plan)
    service.model_loaded(Model(Tokenizer.from_folder(folder), await engine.loaded))
    shutdown = GracefulShutdown(service.lifecycle, config.server, lambda: engine.in_flight, asyncio.Event())
    app = admin_app(service, shutdown, ReloadedSecrets("admin tokens", {Scope.router: TOKEN}))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return StreamWorker(service, client_of(app, "http://127.0.0.1:8001", headers=headers, timeout=60))


def same(answer: Any, expected: Any) -> bool:
    """Return whether two answers are equal. Log-probabilities are rounded by the shape of a batch."""
    if isinstance(expected, float):
        return isinstance(answer, float) and abs(answer - expected) < 1e-3
    if isinstance(expected, dict):
        return isinstance(answer, dict) and answer.keys() == expected.keys() and all(
            same(answer[key], value) for key, value in expected.items()
        )  # fmt: skip
    if isinstance(expected, list | tuple):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    return bool(answer == expected)


async def check_cuts(
    request: OpenStream, first: StreamWorker, others: Sequence[StreamWorker], *, every: int = 1, at_once: int = 16
) -> int:
    """Run a request on the first worker, and continue it on each other one after steps 0, ``every``, 2 * ``every``, ...

    Tokens, answer and usage must be those of the first run. Return the number of continuations.
    """
    stream = bool(json.loads(request.body).get("stream"))
    whole = await Journal(request).follow(first.client)
    expected, usage = answer_of(whole.body, stream=stream), whole.end
    places = asyncio.Semaphore(at_once)

    async def check(steps: int, worker: StreamWorker) -> None:
        async with places:
            journal = await whole.cut(steps).follow(worker.client, resume=True)
        assert journal.start is not None
        where = f"{request.request_id}, stream={stream}, {steps} of {len(whole.steps)} steps"
        for choice in range(len(journal.start.choices)):
            assert journal.ids(choice) == whole.ids(choice), where
        assert (journal.end.prompt_tokens, journal.end.completion_tokens) == (
            usage.prompt_tokens, usage.completion_tokens,
        ), where  # fmt: skip
        answer, wanted = answer_of(journal.body, stream=stream), expected
        if any(not whole.cut(steps).length(choice) for choice in range(len(journal.start.choices))):
            answer, wanted = _without_cached(answer), _without_cached(wanted)
        assert same(answer, wanted), f"{where}:\n{answer}\n{wanted}"

    cuts = [(steps, worker) for steps in range(0, len(whole.steps) + 1, every) for worker in others]
    await all_of(check(*cut) for cut in cuts)
    return len(cuts)


def _without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its cached tokens. Those of a choice without output depend on the worker."""
    usage = answer["usage"]
    usages = [usage] if isinstance(usage, dict) else usage
    bare = [{name: value for name, value in one.items() if name != "prompt_tokens_details"} for one in usages]
    return {**answer, "usage": bare}
