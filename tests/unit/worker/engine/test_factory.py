"""Configurations that an engine refuses before it loads anything, and parts that follow from the device."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.contract import EngineConfig
from specdecode_worker.core.kv_cache import FreeGaps, FreeList
from specdecode_worker.engine.factory import _scheduler, device_of
from specdecode_worker.models.errors import ModelError


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == device_of("cpu").type == "cpu"
    with pytest.raises(ModelError, match="torch sees none here"):
        device_of("cuda")


def test_blocks_are_kept_contiguous_on_cpus_alone() -> None:
    pools = {name: _scheduler(EngineConfig(), 0, 100, "target", torch.device(name))._pool for name in ("cpu", "cuda")}
    assert isinstance(pools["cpu"]._free, FreeGaps)
    assert isinstance(pools["cuda"]._free, FreeList)
