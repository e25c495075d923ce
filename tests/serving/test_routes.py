"""OpenAI's routes over an engine process that always emits the same text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tokenizers.processors import TemplateProcessing

from specdecode_worker.contract import MergedDraft, Plan, PlanRow, TaskMatch, TreeShape
from specdecode_worker.server.generation import Generation, Output
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.server.service import Service
from support import small_model
from support.worker import fake_engine
from support.worker.services import client_of, over_fake_engine

pytestmark = pytest.mark.core

BOS, END = small_model.SPECIAL
CHAT = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "small", "prompt": "hi"}


STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
NAMED = {"type": "function", "function": {"name": "g"}}
TOO_SMALL = {"type": "function", "function": {"name": "g", "parameters": {"enum": [-(2**63)]}}}
REGEX = {"structured_outputs": {"regex": "a"}}


def events(body: str) -> list[Any]:
    """Return the data of every server-sent event. The last event must be [DONE]."""
    lines = body.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [json.loads(item) if item != "[DONE]" else item for item in data]


async def test_chat_answers_with_text_usage_and_speculation(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": fake_engine.TEXT, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    tokens = len(fake_engine.TEXT.encode()) + 1
    assert body["usage"]["completion_tokens"] == tokens
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + tokens
    assert body["usage"]["prompt_tokens"] == len("user\nhi\nassistant\n") + 3
    steps = -(-tokens // fake_engine.TOKENS_PER_STEP)
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, steps],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": 2 * steps,
        "num_draft_tokens": 2 * steps,
        "num_spec_tokens": 2,
    }


async def test_acceptance_histogram_reaches_to_the_deepest_draft_of_the_plan(
    client: httpx.AsyncClient, service: Service
) -> None:
    """Check what AIPerf 0.13 refuses (aiperf/spec_decode/vllm_adapter.py and common/models/spec_decode_models.py)."""
    service.plans.current = Plan(
        initial=TreeShape.chain(1),
        rows=(PlanRow(concurrency=0, context=0, shape=TreeShape.levels(2, 1, 1, 1)),),
        tasks=(TaskMatch(name="code", merge=(MergedDraft(draft="n", depth=5),)),),
    )
    for name, fields in {"chat/completions": CHAT, "completions": {**PROMPT, "n": 2}}.items():
        for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            answer = await client.post(f"/v1/{name}", json={**fields, **stream, "max_tokens": 7})
            root = events(answer.text)[-2] if stream else answer.json()
            found = root["metrics"]["speculative_decoding"]
            histogram = found["acceptance_histogram"]
            assert all(type(count) is int for count in histogram)
            assert len(histogram) == found["num_spec_tokens"] + 1 == 6
            assert sum(histogram) == found["num_spec_steps"] == 3 * fields.get("n", 1)  # type: ignore[operator]
            accepted = sum(length * count for length, count in enumerate(histogram))
            assert accepted == found["num_accepted_draft_tokens"] <= found["num_draft_tokens"]


async def test_completion_streams_pieces_that_join_to_the_text(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/completions",
        json={**PROMPT, "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == fake_engine.TEXT
    assert len(chunks) > 10, "the text should come in pieces"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(fake_engine.TEXT.encode()) + 1
    assert usage["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


async def test_a_stream_without_include_usage_has_none(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 5})
    *chunks, _ = events(answer.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("usage" in chunk or "metrics" in chunk for chunk in chunks)


@pytest.mark.parametrize("n", [1, 2])
async def test_role_comes_with_the_first_token(service: Service, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    first_token, outputs = asyncio.Event(), Generation.outputs

    async def waiting_outputs(generation: Generation) -> AsyncIterator[Output]:
        await first_token.wait()
        async for output in outputs(generation):
            yield output

    monkeypatch.setattr(Generation, "outputs", waiting_outputs)
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 4, "n": n}).encode()
    requested: list[Message] = [{"type": "http.request", "body": body}]
    sent: asyncio.Queue[Message] = asyncio.Queue()

    async def receive() -> Message:
        return requested.pop() if requested else await asyncio.Future()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "headers": [],
        "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "scheme": "http", "root_path": "",
        "client": None, "server": ("worker", 80),
    }  # fmt: skip
    answering = asyncio.create_task(public_app(service)(scope, receive, sent.put))
    assert (await sent.get())["type"] == "http.response.start"
    await asyncio.sleep(0.05)
    assert sent.empty(), "an event came before the first token"
    first_token.set()
    await answering
    text = b"".join(sent.get_nowait().get("body", b"") for _ in range(sent.qsize())).decode()
    deltas = [chunk["choices"][0]["delta"] for chunk in events(text)[:-1]]
    assert deltas[: n + 1] == [{"role": "assistant", "content": ""}] * n + [{"content": "Gr"}]


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 2.5}, "max_tokens", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 9}, "n", None),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"logprobs": 2}, "logprobs", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"min_p": 1.5}, "min_p", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": {"five": 1}}, "logit_bias.five", "invalid_value"),
    ({"logit_bias": {"258": 1}}, "logit_bias", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"min_tokens": 500}, "messages", "context_length_exceeded"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar", "invalid_value"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    ({"tools": [STRICT, TOO_SMALL], "tool_choice": "required"}, "tools[1].function.parameters", "invalid_value"),
    ({**REGEX, "response_format": {"type": "json_object"}}, "structured_outputs", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [STRICT], "response_format": {"type": "json_object"}}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": NAMED, "tools": [STRICT]}, "tool_choice", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", None),
    ({"stop": ["a"] * 5}, "stop", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"prompt": "x"}, "prompt", "unsupported_parameter"),
    ({"bad_words": ["x"], "ignore_eos": True}, "bad_words", "unsupported_parameter"),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length_exceeded"),
    ({"max_tokens": 500}, "messages", "context_length_exceeded"),
    ({"max_tokens": 1 << 62}, "messages", "context_length_exceeded"),
]


async def test_unsupported_fields_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for change, param, code in REFUSED:
        answer = await client.post("/v1/chat/completions", json={**CHAT, **change})
        assert answer.status_code == 400, (change, answer.text)
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code), (change, error)
        assert error["type"] == "invalid_request_error"
        assert error["message"]


NEUTRAL = {
    "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "n": 1, "presence_penalty": 0,
    "frequency_penalty": 0.0, "logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}, "tools": None,
    "seed": 7, "top_k": -1, "stop": None, "parallel_tool_calls": True,
}  # fmt: skip


async def test_fields_without_effect_are_accepted(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **NEUTRAL, "max_tokens": 5})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_ignored_and_named_in_a_header(client: httpx.AsyncClient, stream: bool) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)):
        sent = {**body, "max_tokens": 5, "stream": stream}
        answer = await client.post(path, json={**sent, "foo": 1, "b\n": 2})
        assert (answer.status_code, answer.headers["X-Specdecode-Ignored"]) == (200, "foo, b%0A"), answer.text
        assert "X-Specdecode-Ignored" not in (await client.post(path, json=sent)).headers
    answer = await client.post("/tokenize", json={"prompt": "hi", "foo": 1})
    assert (answer.status_code, answer.headers["X-Specdecode-Ignored"]) == (200, "foo")


BAD_BODIES = [
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b"", 400, "invalid_json"),
    (b'{"model": NaN}', 400, "invalid_json"),
    (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_json"),
    (b'{"model": "small", "prompt": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "invalid_value"),
    (b"{}", 400, "missing_required_parameter"),
    (b'{"model": "other", "prompt": "x"}', 404, "model_not_found"),
    (b'{"model": "small", "prompt": "' + b"x" * 5_000_000 + b'"}', 413, "body_too_large"),
    (b'{"model": "small", "prompt": [300]}', 400, "invalid_value"),
    (b'{"model": "small", "prompt": [-1]}', 400, "invalid_value"),
    (b'{"model": "small", "prompt": ""}', 400, "invalid_value"),
    (b'{"model": "small", "prompt": "\\ud800"}', 400, "invalid_json"),
    (b'{"model": "small", "prompt": "x", "logprobs": 21}', 400, "invalid_value"),
    (b'{"model": "small", "prompt": "x", "max_tokens": 0}', 400, "invalid_value"),
    (b'{"model": "small", "prompt": "x", "suffix": "y"}', 400, "unsupported_parameter"),
]


async def test_bad_bodies_get_an_error_object(client: httpx.AsyncClient) -> None:
    for body, status, code in BAD_BODIES:
        answer = await client.post("/v1/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body[:80]


@contextlib.asynccontextmanager
async def over_tokenizer_with_bos(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a service whose tokenizer adds a special token before each text."""
    small_model.write_tokenizer(folder)
    tokenizer = small_model.byte_tokenizer()
    special = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[special])
    tokenizer.save(str(folder / "tokenizer.json"))
    async with over_fake_engine(folder) as service, client_of(public_app(service)) as client:
        yield client


async def test_special_tokens_of_the_tokenizer_are_added_on_request(tmp_path: Path) -> None:
    tokens = {}
    async with over_tokenizer_with_bos(tmp_path) as client:
        for path, body in (("completions", PROMPT), ("chat/completions", CHAT)):
            for special in (None, False, True):
                sent = {**body, "add_special_tokens": special, "max_tokens": 1}
                answer = await client.post(f"/v1/{path}", json=sent)
                assert answer.status_code == 200, answer.text
                tokens[path, special] = answer.json()["usage"]["prompt_tokens"]
    assert [tokens["completions", special] for special in (None, False, True)] == [3, 2, 3]
    plain = tokens["chat/completions", None]
    assert [tokens["chat/completions", special] for special in (False, True)] == [plain, plain + 1]


@pytest.mark.parametrize(
    ("prompt", "special", "offsets"),
    [
        (f"a{END}b", True, [0, 0, 1, 1 + len(END)]),
        (f"a{END}b", False, [0, 1, 1 + len(END)]),
        (f"{BOS}é", False, [0, len(BOS), len(BOS)]),
        ("é", True, [0, 0, 0]),
    ],
)
async def test_offsets_of_an_echo_with_special_tokens(
    tmp_path: Path, prompt: str, special: bool, offsets: list[int]
) -> None:
    async with over_tokenizer_with_bos(tmp_path) as client:
        sent = {"model": "small", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
        answer = await client.post("/v1/completions", json={**sent, "add_special_tokens": special})
    (choice,) = answer.json()["choices"]
    assert choice["text"] == f"{prompt}G"
    assert choice["logprobs"]["text_offset"] == [*offsets, len(prompt)]


async def test_task_comes_from_header_then_metadata_then_rules(client: httpx.AsyncClient, service: Service) -> None:
    for header, metadata, prompt, task in (
        ("code", {"task": "chat"}, "x", "code"),
        ("unheard", {"task": "code"}, "def f", "other"),
        (None, {"task": "chat"}, "def f", "chat"),
        (None, {"task": "unheard"}, "def f", "code"),
        (None, {"task": 3}, "x", "other"),
        (None, None, "def f", "code"),
    ):
        before = service.counts.finished.copy()
        headers = {} if header is None else {"X-Specdecode-Task": header}
        body = {**PROMPT, "prompt": prompt, "metadata": metadata, "max_tokens": 3}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert [name for name, _ in service.counts.finished - before] == [task], (header, metadata)


async def test_requests_whose_text_is_prepared_have_a_place_in_the_queue(
    client: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, encode = threading.Event(), service.model.tokenizer.encode

    def slow_encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        release.wait(20)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(service.model.tokenizer, "encode", slow_encode)
    body = {"model": "small", "prompt": "x", "max_tokens": 1}
    preparing = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(8)]
    await asyncio.sleep(0.3)
    assert (await client.post("/v1/completions", json=body)).status_code == 429
    release.set()
    assert [answer.status_code for answer in await asyncio.gather(*preparing)] == [200] * 8
    assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_text_that_is_far_too_long_is_not_tokenized_as_a_whole(
    client: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    sizes, encode = [], service.model.tokenizer.encode

    def recorded_encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(service.model.tokenizer, "encode", recorded_encode)
    refused = await client.post(path, json={"model": "small", "prompt": "x" * 20_000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert max(sizes, default=20_000) < 20_000


async def test_detokenize_refuses_more_than_two_contexts(client: httpx.AsyncClient) -> None:
    most = 2 * fake_engine.MAX_MODEL_LEN
    assert (await client.post("/detokenize", json={"tokens": [65] * most})).status_code == 200
    assert (await client.post("/detokenize", json={"tokens": [65] * (most + 1)})).status_code == 400


async def test_full_queue_gives_429_before_any_text_is_tokenized(client: httpx.AsyncClient, service: Service) -> None:
    silent = {"model": "small", "prompt": [fake_engine.SILENT], "max_tokens": 4}
    waiting = [asyncio.create_task(client.post("/v1/completions", json=silent)) for _ in range(8)]
    while service.engine.in_flight < 8:
        await asyncio.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.model.tokenizer, "encode", None)
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            refused = await client.post(path, json=body)
            assert refused.status_code == 429, refused.text
            assert refused.headers["retry-after"] == "1", "nobody has left yet, so nothing is known of the pace"
            assert refused.json()["error"]["type"] == "rate_limit_error"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_prompt_cancels_the_others(client: httpx.AsyncClient, service: Service, stream: bool) -> None:
    before = asyncio.all_tasks()
    prompts = [[fake_engine.SILENT], [fake_engine.REFUSED]]
    answer = await client.post("/v1/completions", json={**PROMPT, "prompt": prompts, "stream": stream})
    error = events(answer.text)[-1]["error"] if stream else answer.json()["error"]
    assert error["message"] == "planted: not this one"
    assert (await service.report()).running == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before, "somebody still waits for tokens"


async def test_finished_requests_are_counted_under_vllms_name(client: httpx.AsyncClient) -> None:
    for fields in ({"max_tokens": 9}, {"max_tokens": 9}, {"stop": [fake_engine.TEXT[4:6]]}):
        await client.post("/v1/completions", json={**PROMPT, **fields})
    text = (await client.get("/metrics")).text
    for reason, count in {"stop": 1, "length": 2, "abort": 0, "error": 0}.items():
        labels = f'{{engine="0",finished_reason="{reason}",model_name="fake"}}'
        assert f"vllm:request_success_total{labels} {count}.0" in text


async def test_dead_engine_ends_streams_and_fails_health(client: httpx.AsyncClient, service: Service) -> None:
    silent = {"model": "small", "prompt": [fake_engine.SILENT], "max_tokens": 4}
    whole = asyncio.create_task(client.post("/v1/completions", json=silent))
    stream = asyncio.create_task(client.post("/v1/completions", json={**silent, "stream": True}))
    while service.engine.in_flight < 2:
        await asyncio.sleep(0.01)
    crash = await client.post("/v1/completions", json={**PROMPT, "prompt": [fake_engine.CRASH]})
    assert crash.status_code == 500
    assert (await whole).json()["error"]["type"] == "server_error"
    assert "planted: the step failed" in (await whole).json()["error"]["message"]
    assert events((await stream).text)[-1]["error"]["code"] == "engine_error"
    assert "planted" in await service.engine.ended
    assert (await client.post("/v1/completions", json=PROMPT)).status_code == 503


async def test_a_format_of_calls_without_a_parser_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Qwen3-Coder's template asks for XML between the tags of Hermes."""
    small_model.write_tokenizer(tmp_path, template="{{ tools }}<tool_call>\n<function=name>\n</function>\n</tool_call>")
    async with over_fake_engine(tmp_path) as service:
        assert "qwen3_coder: requests with tools are refused" in caplog.text
        async with client_of(public_app(service)) as client:
            tools = [{"type": "function", "function": {"name": "f"}}]
            refused = await client.post("/v1/chat/completions", json={**CHAT, "tools": tools})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
            assert "the format qwen3_coder, which has no parser here" in refused.json()["error"]["message"]
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
