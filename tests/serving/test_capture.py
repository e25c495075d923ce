"""Traffic capture: the record that results from the route, the client's opt-out and the end of the request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from specdecode_worker.capture import Dropped, ReadStats, Record, Recorder, opening_hash, read_records
from specdecode_worker.contract import CaptureRules, Plan, TaskMatch
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.training.conversations import read_shard, shard_paths
from specdecode_worker.training.distillation.records import CaptureSelection, prepare_shards, read_samples
from support import small_model
from support.worker import fake_engine
from support.worker.services import client_of, over_fake_engine
from support.worker_process import ready, real


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "captured", CaptureRules(share=1.0, task_shares={"never": 0.0}))


@pytest.fixture
async def client(model_folder: Path, recorder: Recorder) -> AsyncIterator[httpx.AsyncClient]:
    plan = Plan(uid="uid-1", tasks=(TaskMatch(name="code"), TaskMatch(name="never")))
    async with over_fake_engine(model_folder, plan, recorder) as service, client_of(public_app(service)) as made:
        yield made


def records(recorder: Recorder, tmp_path: Path) -> list[Record]:
    recorder.close()
    return list(read_records([tmp_path / "captured"], ReadStats()))


async def chat(client: httpx.AsyncClient, text: str = "hi", headers: dict[str, str] | None = None, **more: Any) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 6, **more}
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


async def test_request_is_captured_as_a_record(client: httpx.AsyncClient, recorder: Recorder, tmp_path: Path) -> None:
    asked = {"seed": 7, "temperature": 0.5, "top_p": 0.9, "logit_bias": {"3": 1.5}, "logprobs": True, "top_logprobs": 2}
    turns = [("system", "be brief"), ("user", "  Say\nhi "), ("assistant", "hi"), ("user", "again")]
    messages = [{"role": role, "content": content} for role, content in turns]
    await chat(client, messages=messages, metadata={"task": "code"}, **asked)
    (record,) = records(recorder, tmp_path)
    said = fake_engine.small_model.byte_tokenizer().encode(fake_engine.TEXT).ids[:6]
    assert list(record.tokens[record.prompt_length :]) == said
    assert record.tokens[0] == 256, "the template's beginning"
    sampling = record.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.logit_bias) == (7, 0.5, 0.9, ((3, 1.5),))
    assert (sampling.logprobs, record.task, record.target, record.share) == (None, "code", "t", 1.0)
    assert record.opening == opening_hash("Say hi"), "the first turn of the user, and not the last"


async def test_each_choice_is_captured_as_one_record(
    client: httpx.AsyncClient, recorder: Recorder, tmp_path: Path
) -> None:
    await chat(client, stream=True, n=2)
    body = {"model": "small", "prompt": ["one", [65, 66]], "max_tokens": 4}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    captured = records(recorder, tmp_path)
    assert [one.output_length for one in captured] == [6, 6, 4, 4]
    assert len({one.sampling.seed for one in captured}) == 4, "replay needs the seed that was drawn"
    assert [one.opening for one in captured[2:]] == [opening_hash("one"), opening_hash("65 66")]


async def test_the_hash_of_the_user_is_captured(client: httpx.AsyncClient, recorder: Recorder, tmp_path: Path) -> None:
    for user in ("ann@example.org", 7, None):
        await chat(client, user=user)
    captured = records(recorder, tmp_path)
    assert [one.user for one in captured] == [recorder.subject_of("ann@example.org"), recorder.subject_of("7"), ""]


@pytest.mark.parametrize(
    "wish",
    [
        {"metadata": {"capture": False}},
        {"metadata": {"capture": "false"}},
        {"metadata": {"capture": "rather not"}},
        {"metadata": {"capture": 0}},
        {"headers": {"X-Specdecode-Capture": "off"}},
        {"headers": {"x-specdecode-capture": "OFF"}},
        {"headers": {"X-Specdecode-Capture": "off"}, "metadata": {"capture": True}},
    ],
)
async def test_client_can_opt_out_of_capture(
    wish: dict[str, Any], client: httpx.AsyncClient, recorder: Recorder, tmp_path: Path
) -> None:
    await chat(client, **wish)
    assert records(recorder, tmp_path) == []
    assert recorder.counts.dropped == {Dropped.opted_out: 1}


async def test_echoes_and_failures_are_not_captured(
    client: httpx.AsyncClient, recorder: Recorder, tmp_path: Path
) -> None:
    echo = {"model": "small", "prompt": "abc", "max_tokens": 0, "echo": True}
    assert (await client.post("/v1/completions", json=echo)).status_code == 200
    refused = {"model": "small", "prompt": [fake_engine.REFUSED], "max_tokens": 4}
    assert (await client.post("/v1/completions", json=refused)).status_code == 500
    assert records(recorder, tmp_path) == []


SAMPLING_PARAMS = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.4, "n": 2},
    {"temperature": 0, "stop": ["e"], "min_tokens": 3},
)


def test_captured_traffic_equals_served_traffic(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A real server on a small random Llama, its shards, and the preparation of ``distill``."""
    target, capture = folders[0], tmp_path / "capture"
    with ready(real([*small_model.flags(*folders), "--capture", str(capture)], tmp_path / "log")) as worker:
        for number in range(20):
            said = [{"role": "user", "content": f"{number} things about {number * 17}"}]
            body = {"model": "small", "messages": said, "max_tokens": 20, "ignore_eos": True}
            body |= SAMPLING_PARAMS[number % 4]
            assert httpx.post(f"{worker.public}/v1/chat/completions", json=body, timeout=60).status_code == 200
        worker.terminate()
        assert worker.exit_code() == 0
    stats = ReadStats()
    records = list(read_records([capture], stats))
    assert (len(records), stats.segments, stats.torn) == (25, 1, 0)
    model = load_causal_lm(target, dtype=torch.float32, device=torch.device("cpu"))
    source = CaptureSelection(folders=(capture,), target=model_hash(target), positions=256)
    summary = prepare_shards(model, source, tmp_path / "data", lambda line: None, lambda: False)
    assert set(summary.dropped) <= {"overlaps", "too_short"}, "whatever the law, the target says it again"
    assert sum(summary.used.values()) + sum(summary.dropped.values()) == 25
    samples = [sample for split in summary.used for sample in read_samples(tmp_path / "data" / split)]
    assert {sample.record for sample in samples} <= set(records)
    shards = [c for split in summary.used for path in shard_paths(tmp_path / "data" / split) for c in read_shard(path)]
    assert [c.tokens_N.tolist() for c in shards] == [list(sample.record.tokens[:-1]) for sample in samples]
    assert json.loads((tmp_path / "data" / "summary.json").read_text())["used"] == summary.used
