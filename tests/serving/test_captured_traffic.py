"""Captured traffic end to end: a real server on a small random Llama, its shards, and ``distill``'s preparation."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import torch

from specdecode_worker.capture import ReadStats, read_records
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.conversations import read_shard, shard_paths
from specdecode_worker.training.distillation.records import CaptureSelection, prepare_shards, read_samples
from support import small_model
from support.worker_process import real

SAMPLING_PARAMS = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.4, "n": 2},
    {"temperature": 0, "stop": ["e"], "min_tokens": 3},
)


def test_captured_traffic_equals_served_traffic(tmp_path: Path) -> None:
    target, draft, capture = (tmp_path / name for name in ("target", "draft", "capture"))
    target.mkdir()
    draft.mkdir()
    small_model.write_target(target)
    small_model.write_draft(draft)
    flags = ["--model", f"file://{target}", "--draft", f"file://{draft}", "--served-model-name", "small"]
    flags += ["--dtype", "float32", "--threads", "1", "--capture", str(capture)]
    with real(flags, tmp_path / "log") as worker:
        worker.wait_ready()
        for number in range(20):
            said = [{"role": "user", "content": f"{number} things about {number * 17}"}]
            body = {
                "model": "small",
                "messages": said,
                "max_tokens": 20,
                "ignore_eos": True,
                **SAMPLING_PARAMS[number % 4],
            }
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
