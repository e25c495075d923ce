"""Tests of request capture: text that a replay cannot reproduce is not captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker.capture import Dropped, Recorder
from specdecode_worker.contract import CaptureConfig, Sampler
from specdecode_worker.engine.ipc.messages import Sampling, Tokens
from specdecode_worker.server.request_capture import Capturing
from specdecode_worker.server.text.prompts import Prompt


@pytest.mark.parametrize(("sampler", "temperature", "taken"), [("mss", 0.7, 0), ("mss", 0.0, 1), ("coupled", 0.7, 1)])
def test_multi_round_text_is_captured_where_it_is_greedy(
    sampler: Sampler, temperature: float, taken: int, tmp_path: Path
) -> None:
    recorder = Recorder(CaptureConfig(dir=str(tmp_path)))
    capturing = Capturing(recorder, "t", sampler)
    watch = capturing.watch(Prompt((1, 2)), Sampling(max_tokens=3, seed=1, temperature=temperature), "other")
    if watch is not None:
        watch.take(Tokens(request_id="r", tokens=(4,)))
        watch.end()
        watch.end()
    recorder.close()
    assert recorder.counts.records.total() == taken
    assert recorder.counts.dropped[Dropped.not_repeatable] == 1 - taken
