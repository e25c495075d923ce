"""What an engine refuses before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdecode_worker.contract import EngineConfig, ModelConfig, WorkerConfig
from specdecode_worker.engine.factory import device_of, load_engine
from specdecode_worker.models.errors import ModelError


def unreachable(uri: str) -> Path:
    raise AssertionError(f"{uri} was loaded")


def test_several_devices_are_refused_and_not_ignored() -> None:
    config = WorkerConfig(
        model=ModelConfig(uri="embedded://t", served_name="t"),
        engine=EngineConfig(device="cpu", tensor_parallel_size=4),
    )
    with pytest.raises(ModelError, match="tensorParallelSize is 4"):
        load_engine(config, unreachable)


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == device_of("cpu").type == "cpu"
    with pytest.raises(ModelError, match="sees no GPU"):
        device_of("cuda")
