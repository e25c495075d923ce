"""Live capture with the embedded model: what was served is stored, and a replay of it is valid."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx

from specdecode_worker.capture import ReadStats, read_records
from specdecode_worker.contract import (
    DraftConfig,
    EngineConfig,
    Env,
    ModelConfig,
    Plan,
    Report,
    Route,
    ServerConfig,
    WorkerConfig,
)
from specdecode_worker.contract.capture import CaptureRules
from support.worker_process import running_worker


def test_served_text_of_the_embedded_model_is_captured_by_a_plan(tmp_path: Path) -> None:
    config = WorkerConfig(
        deployment_uid="uid-1",
        model=ModelConfig(uri="embedded://smollm2-135m-instruct", served_name="smollm2"),
        draft=DraftConfig(method="eagle3", uri="embedded://smollm2-135m-instruct-eagle3"),
        engine=EngineConfig(max_num_seqs=2, kv_cache_tokens=4096, threads=1),
        server=ServerConfig(host="127.0.0.1", port=0, admin_port=0, endpoint_delay_seconds=0, grace_period_seconds=5),
        capture_dir=str(tmp_path / "captures"),
    )
    words = [sys.executable, "-m", "specdecode_worker", "serve"]
    with running_worker(words, tmp_path / "log", {Env.config: config.model_dump_json()}) as worker:
        worker.wait_ready()
        target = Report.model_validate(worker.call_admin(Route.report).json()).target
        plan = Plan(uid="uid-1", version=1, capture=CaptureRules(share=1.0, consent="OptIn"))
        assert worker.call_admin(Route.plan, "PUT", content=plan.model_dump_json()).status_code == 200
        body = {"model": "smollm2", "max_tokens": 12, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        texts = []
        for number, header in enumerate(("on", "off", "on")):
            headers = {"X-Specdecode-Capture": header}
            answer = httpx.post(
                f"{worker.public}/v1/chat/completions", json={**body, "seed": number}, headers=headers, timeout=60
            )
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["usage"]["completion_tokens"])
        worker.wait_until(lambda: _stored(worker.call_admin(Route.report).json()) == 2, 20)
        stored = list(read_records([tmp_path / "captures"], ReadStats()))
        worker.terminate()
        assert worker.exit_code() == 0
    assert [(one.sampling.seed, one.output_length) for one in stored] == [(0, texts[0]), (2, texts[2])]
    assert all(one.target == target and one.permitted and one.time_seconds <= time.time() for one in stored)


def _stored(report: dict[str, object]) -> int:
    capture = Report.model_validate(report).capture
    assert capture is not None
    return capture.conversations
