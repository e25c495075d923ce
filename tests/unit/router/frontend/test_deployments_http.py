"""Two deployments behind one router: shares by conversation, metrics, a failing trial, and no change of model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from specdecode_router.discovery.sources import open_sources
from specdecode_router.process import _apply, running_router
from specdecode_router.settings import LiveSettings, RouterSettings
from support.router_harness import RouterUnderTest
from support.stand_in_worker import TOKEN, Script, StandInWorker, running
from support.waiting import eventually

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def two_deployments(
    old: Script, new: Script, percent: int, folder: Path, token: str = TOKEN
) -> AsyncIterator[RouterUnderTest]:
    """Yield a router over one worker of each deployment. ``token`` is what the file of the new one has."""
    (folder / "token").write_text(token)
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running(StandInWorker(script))) for script in (old, new)]
        settings = RouterSettings.model_validate({
            "deployment": "old", "workers": [workers[0].url], "no_worker_seconds": 0.5, "load_seconds": 0.5,
            "backends": [f"name=new,percent={percent},worker={workers[1].url},token-file={folder / 'token'}"],
        })  # fmt: skip
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        discovery, demand = await stack.enter_async_context(open_sources(settings))
        state = await stack.enter_async_context(running_router(settings, lambda: (TOKEN,), discovery, listener, demand))
        client = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        router = RouterUnderTest(state, workers, client, port)
        yield router


def turn(conversation: int, number: int = 0, *, stream: bool = False) -> bytes:
    messages = [{"role": "user", "content": f"conversation {conversation}"}]
    messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}] * number
    return json.dumps({"messages": messages, "stream": stream}).encode()


async def test_conversations_stay_and_are_counted_by_deployment(tmp_path: Path) -> None:
    async with two_deployments(Script(tokens=1), Script(tokens=1, key="key-2"), 30, tmp_path) as router:
        await router.wait_for_reports()
        for conversation in range(100):
            for number in range(2):
                status, _, _ = await router.post(CHAT, data=turn(conversation, number))
                assert status == 200
        old, new = ([json.loads(one.body)["messages"][0]["content"] for one in worker.requests]
                    for worker in router.workers)  # fmt: skip
        assert not set(old) & set(new), "a conversation stays with one model"
        assert 15 < len(set(new)) < 45
        _, _, metrics = await router.get("/metrics")
        for name, requests in (("old", old), ("new", new)):
            expected = (
                f'specdecode_router_deployment_requests_total{{code="200",deployment="{name}"}} {len(requests)}.0'
            )
            assert expected in metrics.decode()


async def test_a_broken_stream_is_not_continued_by_the_other_model(tmp_path: Path) -> None:
    async with two_deployments(Script(), Script(key="key-2", close_at=5), 100, tmp_path) as router:
        await router.wait_for_reports()
        _, _, answer = await router.post(CHAT, data=turn(1, stream=True))
        assert b'"error"' in answer
        assert router.workers[1].requests
        assert not router.workers[0].requests


async def test_without_a_token_for_the_trial_the_own_deployment_serves(tmp_path: Path) -> None:
    async with two_deployments(Script(tokens=1), Script(tokens=1, key="key-2"), 100, tmp_path, "wrong") as router:
        status, _, _ = await router.post(CHAT, data=turn(1))
        assert status == 200
        assert len(router.workers[0].requests) == 1
        assert not router.workers[1].requests


async def test_a_worker_may_know_either_token_of_a_file(tmp_path: Path) -> None:
    both = f"next\n{TOKEN}\n"
    async with two_deployments(Script(tokens=1), Script(tokens=1, key="key-2"), 100, tmp_path, both) as router:
        await router.wait_for_reports()
        trial = router.workers[1]
        for accepted in (TOKEN, "next"):
            trial.token = accepted
            before = len(trial.requests)
            status, _, _ = await router.post(CHAT, data=turn(1))
            assert (status, len(trial.requests)) == (200, before + 1), "the worker was asked, and answered"
            assert (await router.get("/v1/models"))[0] == 200
            assert router.state.relay.workers.counts() == {"ready": 2, "suspect": 0, "terminating": 0}


async def test_workers_of_a_deployment_without_a_share_are_no_places(tmp_path: Path) -> None:
    async with two_deployments(Script(tokens=1), Script(tokens=1, key="key-2"), 0, tmp_path) as router:
        state, workers = router.state, router.state.relay.workers
        await eventually(lambda: len(workers.endpoints) == 2)
        await router.wait_for_reports()
        assert workers.capacity == 80, "64 rows of the own worker, and a quarter"
        both = workers.endpoints
        workers.update([one for one in both if one.deployment == "new"])
        held = asyncio.create_task(router.post(CHAT, data=turn(1)))
        await eventually(lambda: state.admission.held == 1)
        workers.update(both)
        assert (await held)[0] == 200
        await router.wait_for_reports()
        backends = (state.settings.backends[0].model_copy(update={"percent": 50}),)
        _apply(LiveSettings(state.settings.model_copy(update={"backends": backends})), state)
        assert state.admission._capacity == 160
