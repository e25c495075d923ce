"""Tests of request capture: text that a replay cannot reproduce is not captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker.capture import Dropped, Recorder
from specdecode_worker.contract import CaptureConfig, Sampler
from specdecode_worker.engine.ipc.messages import Sampling, Tokens
from specdecode_worker.server.request_capture import RequestCapture
from specdecode_worker.server.text.prompts import Prompt


@pytest.mark.parametrize(("sampler", "temperature", "taken"), [("mss", 0.7, 0), ("mss", 0.0, 1), ("coupled", 0.7, 1)])
def test_mss_requests_are_captured_only_if_greedy(
    sampler: Sampler, temperature: float, taken: int, tmp_path: Path
) -> None:
    recorder = Recorder(CaptureConfig(dir=str(tmp_path)))
    capture = RequestCapture(recorder, "t", sampler)
    builder = capture.start_record(Prompt((1, 2)), Sampling(max_tokens=3, seed=1, temperature=temperature), "other")
    if builder is not None:
        builder.process(Tokens(request_id="r", tokens=(4,)))
        builder.end()
        builder.end()
    recorder.close()
    assert recorder.counts.records.total() == taken
    assert recorder.counts.dropped[Dropped.not_repeatable] == 1 - taken
