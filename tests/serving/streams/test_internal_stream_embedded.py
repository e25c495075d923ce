"""Continuation of requests on another worker with the embedded model, of whose characters some are several tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, ServerConfig, WorkerConfig
from specdecode_worker.contract.internal_stream import OpenStream
from specdecode_worker.models.fetch import default_cache_dir, resolve
from support.stream_workers import StreamWorker, check_cuts, start_worker

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

AT_ONCE = 8
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "prompt": "Repeat after me: \u4f60\u597d, \u2728 caf\u00e9! \u4f60\u597d, \u2728"},
    "sampled": {"temperature": 0.8, "prompt": "Il \u00e9tait une fois une \u00e9l\u00e8ve \u00e0"},
    "emoji": {
        "temperature": 1.0,
        "top_p": 0.95,
        "prompt": "\U0001f600 \U0001f680 \U0001f389 \U0001f600 \U0001f680",
        "n": 2,
    },
    "logprobs": {"temperature": 0.7, "prompt": "The capital of France is", "logprobs": 2, "echo": True},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[tuple[StreamWorker, StreamWorker]]:
    """Yield a worker without a draft and one with trees of the trained draft."""
    cache = default_cache_dir()
    config = WorkerConfig(
        deployment_uid="uid-1",
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="small", dtype="float32", max_model_len=512),
        engine=EngineConfig(max_num_seqs=AT_ONCE, device="cpu", threads=1, kv_cache_tokens=AT_ONCE * 512),
        server=ServerConfig(max_waiting=4 * AT_ONCE),
        cache_dir=str(cache),
    )
    folder = resolve(EMBEDDED_TARGET, cache)
    draft = DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True)
    started = await asyncio.gather(
        start_worker(config, folder, "none"),
        start_worker(config.model_copy(update={"draft": draft}), folder, "tree:2,1,1"),
    )
    yield started[0], started[1]
    await asyncio.gather(*(worker.close() for worker in started))


@pytest.mark.parametrize("name", REQUESTS)
async def test_continued_text_equals_the_unbroken_one(workers: tuple[StreamWorker, StreamWorker], name: str) -> None:
    body = {"model": "small", "max_tokens": 16, "seed": 3, "ignore_eos": True, "stream": True, **REQUESTS[name]}
    request = OpenStream(route="/v1/completions", body=json.dumps(body).encode(), request_id=name)
    assert await check_cuts(request, workers[0], workers[1:], every=3, at_once=AT_ONCE) > 5
    assert await check_cuts(request, workers[1], workers[:1], every=3, at_once=AT_ONCE) > 1
