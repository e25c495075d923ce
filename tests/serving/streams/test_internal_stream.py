"""Continuation of requests on another worker, at every token, with the real engine on a small random Llama.

The plain worker decodes without a draft, one token a step. The drafting worker verifies trees of a draft that is the
target itself, of whose tokens a part is refused, so that its steps have one to four tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from specdecode_worker.contract import DraftConfig
from specdecode_worker.contract.internal_stream import Error, OpenStream
from support import small_model
from support.internal_client import Journal, answer_of
from support.stream_workers import StreamWorker, check_cuts, check_rests, start_worker
from support.worker_process import worker_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 14
AT_ONCE = 32
END = str(small_model.END_ID)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANIMAL}}
DISTANCE = {"type": "object", "properties": {"to": {"enum": ["Rome", "Oslo"]}}, "required": ["to"],
            "additionalProperties": False}  # fmt: skip
PLANNED = [{"type": "function", "function": {"name": "go", "parameters": DISTANCE}},
           {"type": "function", "function": {"name": "stop"}}]  # fmt: skip


def bias(text: str, value: float, **more: float) -> dict[str, float]:
    """Return a logit bias for the bytes of a text, and for further token ids."""
    ids = small_model.byte_tokenizer().encode(text).ids
    return {**{str(token): value for token in ids}, **{name.removeprefix("t"): one for name, one in more.items()}}


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "without a seed": {"temperature": 0.8, "seed": None},
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
    "stop over min_tokens": {"logit_bias": bias("AB", 14), "stop": ["BAB", "ABBA"], "min_tokens": 5},
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
    "echo with special tokens": {"prompt": f"a{small_model.SPECIAL[1]}b", "echo": True, "logprobs": 0},
    "within a character": {
        "prompt": small_model.byte_tokenizer().encode("🙂").ids[:3], "echo": True, "logit_bias": bias("🙂é", 9),
    },
    "echo alone": {"prompt": "some text", "echo": True, "logprobs": 1, "max_tokens": 0},
    "schema": {"response_format": ANSWER, "max_tokens": 40, "ignore_eos": False},
    "two schemas": {"response_format": ANSWER, "n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 24},
    "regex": {"structured_outputs": {"regex": "(ab|cd){2,9}!"}, "presence_penalty": 1, "ignore_eos": False},
    "choice": {"prompt": "either", "structured_outputs": {"choice": ["yes, sure", "yes, or no"]}, "ignore_eos": False},
    "ends of a grammar": {"structured_outputs": {"regex": "a|b{6}"}, "n": 3, "temperature": 2},
    "required tool": {"tools": PLANNED, "tool_choice": "required", "max_tokens": 70, "ignore_eos": False},
    "named tool": {
        "tools": PLANNED, "tool_choice": {"type": "function", "function": {"name": "go"}}, "max_tokens": 70,
        "ignore_eos": False, "logprobs": True,
    },
    "bad words": {"bad_words": ["a", "\u00e9", " t"], "ignore_eos": False, "temperature": 0.9},
    "allowed tokens": {"allowed_token_ids": small_model.byte_tokenizer().encode("abc ").ids, "presence_penalty": 1},
    "end of a prompt": {"prompt": "once upon", "truncate_prompt_tokens": 4, "echo": True, "logprobs": 1},
    "thinking": {
        "messages": [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": "<think>"}],
        "continue_final_message": True, "add_generation_prompt": False, "logprobs": True, "logit_bias": bias("</t", 9),
    },
    "special tokens": {"skip_special_tokens": False, "logit_bias": bias("\u20ac", 9, t256=9)},
}  # fmt: skip

LONG = frozenset({"named tool"})
"""Cases that are continued at every fourth step, because a shorter one is like them; so are answers in one piece."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[StreamWorker, StreamWorker]]:
    folder = tmp_path_factory.mktemp("target")
    small_model.write_varied_target(folder, 512)
    server = {"max_waiting": 4 * AT_ONCE, "reasoning_parser": "qwen3"}
    config = worker_config(folder, server=server, max_num_seqs=AT_ONCE, threads=1)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    draft = DraftConfig(method="draft-model", uri=f"file://{folder}", required=True)
    started = await asyncio.gather(
        start_worker(config, folder, "none"),
        start_worker(config.model_copy(update={"draft": draft}), folder, "tree:2,1,1"),
    )
    yield started[0], started[1]
    await asyncio.gather(*(worker.close() for worker in started))


def request_of(name: str, *, stream: bool) -> OpenStream:
    fields = dict(CASES[name])
    route = COMPLETIONS if "prompt" in fields else CHAT
    body = {"model": "small", "max_tokens": TOKENS, "seed": 77, "ignore_eos": True, "stream": stream, **fields}
    if route == CHAT and "messages" not in body:
        body["messages"] = [{"role": "user", "content": f"tell me, {name}"}]
    if not stream:
        body.pop("stream_options", None)
    return OpenStream(route=route, body=json.dumps(body).encode(), request_id=f"id-{name.replace(' ', '-')}")


@pytest.mark.parametrize("name", CASES)
async def test_continued_answer_equals_the_unbroken_one(workers: tuple[StreamWorker, StreamWorker], name: str) -> None:
    plain, drafting = workers
    for stream in (True, False):
        request = request_of(name, stream=stream)
        every = 4 if name in LONG or not stream else 1
        cuts = await check_cuts(request, plain, (plain, drafting), every=every)
        cuts += await check_cuts(request, drafting, (plain,) if stream else (drafting,), every=every)
        assert cuts > 2


@pytest.mark.parametrize("name", list(CASES))
async def test_rest_after_every_event_completes_the_stream(
    workers: tuple[StreamWorker, StreamWorker], name: str
) -> None:
    plain, drafting = workers
    request = request_of(name, stream=True)
    assert await check_rests(request, plain, drafting) >= 1
    assert await check_rests(request, drafting, plain) >= 1


async def test_thinking_is_apart(workers: tuple[StreamWorker, StreamWorker]) -> None:
    for stream in (True, False):
        journal = await Journal(request_of("thinking", stream=stream)).follow(workers[1].client)
        choice = answer_of(journal.body, stream=stream)["choices"][0]
        message = {"reasoning_content": choice["thought"], "content": choice["text"]} if stream else choice["message"]
        assert len(message["reasoning_content"]) > 3
        assert not message["content"]


async def test_the_drafting_worker_drafts(workers: tuple[StreamWorker, StreamWorker]) -> None:
    journal = await Journal(request_of("completion", stream=True)).follow(workers[1].client)
    assert max(len(step.ids) for step in journal.steps) > 1
    assert {len(step.ids) for step in journal.steps} != {1}


async def test_other_key_is_refused_for_another_worker(workers: tuple[StreamWorker, StreamWorker]) -> None:
    plain, drafting = workers
    assert plain.service.compatibility_key == drafting.service.compatibility_key
    assert len(plain.service.compatibility_key) == 32
    journal = await Journal(request_of("greedy", stream=True)).follow(plain.client)
    assert journal.start is not None
    journal.start = msgspec.structs.replace(journal.start, compatibility_key="other")
    refused = await journal.cut(3).follow(plain.client, resume=True)
    assert isinstance(refused.last, Error)
    assert (refused.last.status, refused.last.retryable) == (409, True)
