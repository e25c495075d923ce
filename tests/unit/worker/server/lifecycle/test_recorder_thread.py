"""The capture recorder at the start of a worker: rules of its configuration and of its plan, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.capture.segments import Retention
from specdecode_worker.contract import CaptureConfig, CaptureRules, ModelConfig, Plan, WorkerConfig
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.request_capture import open_recorder


def config(capture: CaptureConfig | None = None, capture_dir: Path | None = None) -> WorkerConfig:
    model = ModelConfig(uri="file:///m", served_name="m")
    return WorkerConfig(model=model, capture=capture, capture_dir=None if capture_dir is None else str(capture_dir))


def test_rules_of_the_configuration_and_of_the_plan(tmp_path: Path) -> None:
    fixed = CaptureConfig(dir=str(tmp_path / "a"), max_bytes=2**20, max_age_seconds=60.0, task_shares={"code": 0.25})
    plan = Plan(capture=CaptureRules(share=0.5))
    recorder = open_recorder(config(fixed, tmp_path / "b"), plan)
    assert recorder.folder == tmp_path / "a"
    assert recorder.retention == Retention(60.0, 2**20)
    assert (recorder.share_of("code"), recorder.share_of("other"), recorder.consent) == (0.25, 1.0, "OptOut")
    recorder.close()
    recorder = open_recorder(config(None, tmp_path / "b"), plan)
    assert (recorder.folder, recorder.share_of("other")) == (tmp_path / "b", 0.5)
    recorder.close()
    assert open_recorder(config(), plan) is None


@pytest.mark.parametrize(
    "wrong",
    [{"redact": f"{name}"} for name in ("no_such_module:f", "json:missing", "json:decoder")] + [{"dir": "/proc/here"}],
)
def test_a_configuration_that_cannot_be_used_is_refused_at_the_start(wrong: dict[str, Any], tmp_path: Path) -> None:
    fixed = CaptureConfig(**{"dir": str(tmp_path), **wrong})
    with pytest.raises(CannotStart, match=next(iter(wrong.values()))):
        open_recorder(config(fixed), Plan())
