"""Continuation of requests on another worker, at every token, with the real engine on a small random Llama.

The plain worker decodes without a draft, one token a step. The drafting worker verifies trees of a draft that is the
target itself, of whose tokens a part is refused, so that its steps have one to four tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import small_model
from internal_client import Journal, answer_of
from worker_process import worker_config

from specdecode_worker.contract import DraftConfig, Plan, SyntheticKnobs, TreeShape, WorkerConfig
from specdecode_worker.contract.internal_stream import Error, OpenStream
from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.server.access.reloaded_secrets import ReloadedSecrets
from specdecode_worker.server.access.scopes import Scope
from specdecode_worker.server.lifecycle import Lifecycle, Shutdown
from specdecode_worker.server.routes.admin import admin_app
from specdecode_worker.server.served_model import Model
from specdecode_worker.server.service import Service
from specdecode_worker.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "token-of-the-tests"
TOKENS = 14
AT_ONCE = 32
END = str(small_model.END_ID)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def bias(text: str, value: float, **more: float) -> dict[str, float]:
    """Return a logit bias for the bytes of a text, and for further token ids."""
    ids = small_model.byte_tokenizer().encode(text).ids
    return {**{str(token): value for token in ids}, **{name.removeprefix("t"): one for name, one in more.items()}}


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "min_p": {"temperature": 1.2, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8, "presence_penalty": 0.9, "frequency_penalty": 1.1, "repetition_penalty": 1.3,
        "logit_bias": bias("abc", 7),
    },
    "greedy penalties": {
        "temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.5, "logit_bias": bias("abc", 9),
    },
    "logit_bias": {"logit_bias": bias("ab\u00e9\u20ac", 9)},
    "min_tokens": {"logit_bias": {END: 14}, "min_tokens": 7, "ignore_eos": False},
    "end of text": {"logit_bias": {END: 2.5}, "ignore_eos": False},
    "stop strings": {"logit_bias": bias("AB", 14), "stop": ["BAAAAAAB", "BB"], "max_tokens": 24},
    "shown stop": {"logit_bias": bias("AB", 14), "stop": ["BBAB", "ABBA"], "include_stop_str_in_output": True},
    "held to the end": {"logit_bias": bias("A", 40), "stop": ["A" * 40]},
    "stop_token_ids": {"logit_bias": bias("AB", 12, t34=8), "stop_token_ids": [34]},
    "tools": {"tools": TOOLS},
    "tools with logprobs": {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "logit_bias": bias("< a", 14)},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "logit_bias": bias("\u00e9\u20aca", 9)},
    "two choices": {"n": 2},
    "two choices with stops": {"n": 2, "logit_bias": bias("AB", 14), "stop": ["ABB"]},
    "usage": {"n": 2, "stream_options": {"include_usage": True}},
    "completion": {"prompt": "once upon"},
    "prompts": {"prompt": ["first", "the second"], "n": 2, "max_tokens": 6},
    "echo": {"prompt": "gr\u00fc\u00dfe an", "echo": True, "logprobs": 2},
    "echo alone": {"prompt": "some text", "echo": True, "logprobs": 1, "max_tokens": 0},
    "best_of": {"prompt": "choose", "best_of": 3, "n": 2, "max_tokens": 6},
    "special tokens": {"skip_special_tokens": False, "logit_bias": bias("\u20ac", 9, t256=9)},
}  # fmt: skip


@dataclass
class Worker:
    """A worker in this process with an engine process of its own."""

    service: Service
    client: httpx.AsyncClient


async def _start(config: WorkerConfig, folder: Path, shape: str) -> Worker:
    plan = Plan(uid="uid-1", version=1, initial=TreeShape.parse(shape), max_depth=4, explore=0, guard=False)
    knobs = SyntheticKnobs(acceptance=(0.8, 0.7)) if shape != "none" else None
    engine = EngineClient(config, plan, knobs)
    service = Service(config, engine, Lifecycle(), plan)
    service.model_loaded(Model(Tokenizer.from_folder(folder), await engine.loaded))
    shutdown = Shutdown(service.lifecycle, config.server, lambda: engine.in_flight, asyncio.Event())
    app = admin_app(service, shutdown, ReloadedSecrets("admin tokens", {Scope.router: TOKEN}))
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://127.0.0.1:8001",
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=60,
    )
    return Worker(service, client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Worker, Worker]]:
    """Yield the plain and the drafting worker."""
    folder = tmp_path_factory.mktemp("target")
    small_model.write_varied_target(folder)
    config = worker_config(folder, max_num_seqs=AT_ONCE, threads=1)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": "float32"}),
            "server": config.server.model_copy(update={"max_waiting": 4 * AT_ONCE}),
        }
    )
    draft = DraftConfig(method="draft-model", uri=f"file://{folder}", required=True)
    started = await asyncio.gather(
        _start(config, folder, "none"),
        _start(config.model_copy(update={"draft": draft}), folder, "tree:2,1,1"),
    )
    yield started[0], started[1]
    await asyncio.gather(*(worker.service.engine.close() for worker in started))


def request_of(name: str, *, stream: bool) -> OpenStream:
    """Return the request of a case."""
    fields = dict(CASES[name])
    route = COMPLETIONS if "prompt" in fields else CHAT
    body = {"model": "small", "max_tokens": TOKENS, "seed": 77, "ignore_eos": True, "stream": stream, **fields}
    if route == CHAT:
        body["messages"] = [{"role": "user", "content": f"tell me, {name}"}]
    if not stream:
        body.pop("stream_options", None)
    return OpenStream(route=route, body=json.dumps(body).encode(), request_id=f"id-{name.replace(' ', '-')}")


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


async def check_all_cuts(name: str, first: Worker, others: tuple[Worker, ...], *, stream: bool) -> int:
    """Run a request on the first worker, and continue it after each of its steps on each other one."""
    whole = await Journal(request_of(name, stream=stream)).follow(first.client)
    expected, usage = answer_of(whole.body, stream=stream), whole.end
    places = asyncio.Semaphore(AT_ONCE // 2)

    async def check(steps: int, worker: Worker) -> None:
        async with places:
            journal = await whole.cut(steps).follow(worker.client, resume=True)
        assert journal.start is not None
        where = f"{name}, stream={stream}, {steps} of {len(whole.steps)} steps"
        for choice in range(len(journal.start.choices)):
            assert journal.ids(choice) == whole.ids(choice), where
        assert (journal.end.prompt_tokens, journal.end.completion_tokens) == (
            usage.prompt_tokens, usage.completion_tokens,
        ), where  # fmt: skip
        answer, wanted = answer_of(journal.body, stream=stream), expected
        if any(not whole.cut(steps).length(choice) for choice in range(len(journal.start.choices))):
            answer, wanted = _without_cached(answer), _without_cached(wanted)
        assert same(answer, wanted), f"{where}:\n{answer}\n{wanted}"

    cuts = [(steps, worker) for steps in range(len(whole.steps) + 1) for worker in others]
    await asyncio.gather(*(check(*cut) for cut in cuts))
    return len(cuts)


def _without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its cached tokens. Those of a choice without output depend on the worker."""
    usage = answer["usage"]
    usages = [usage] if isinstance(usage, dict) else usage
    bare = [{name: value for name, value in one.items() if name != "prompt_tokens_details"} for one in usages]
    return {**answer, "usage": bare}


@pytest.mark.parametrize("name", CASES)
async def test_continued_answer_equals_the_unbroken_one(workers: tuple[Worker, Worker], name: str) -> None:
    plain, drafting = workers
    streams = (False,) if "best_of" in CASES[name] else (True, False)
    for stream in streams:
        cuts = await check_all_cuts(name, plain, (plain, drafting), stream=stream)
        cuts += await check_all_cuts(name, drafting, (plain,) if stream else (drafting,), stream=stream)
        assert cuts > 2


async def test_the_drafting_worker_drafts(workers: tuple[Worker, Worker]) -> None:
    journal = await Journal(request_of("sampled", stream=True)).follow(workers[1].client)
    assert max(len(step.ids) for step in journal.steps) > 1
    assert {len(step.ids) for step in journal.steps} != {1}


async def test_other_key_is_refused_for_another_worker(workers: tuple[Worker, Worker]) -> None:
    plain, drafting = workers
    assert plain.service.compatibility_key == drafting.service.compatibility_key
    assert len(plain.service.compatibility_key) == 32
    journal = await Journal(request_of("greedy", stream=True)).follow(plain.client)
    journal.start = type(journal.start)(  # type: ignore[misc]
        **{**{f: getattr(journal.start, f) for f in journal.start.__struct_fields__}, "compatibility_key": "other"}  # type: ignore[union-attr]
    )
    refused = await journal.cut(3).follow(plain.client, resume=True)
    assert isinstance(refused.last, Error)
    assert (refused.last.status, refused.last.retryable) == (409, True)
