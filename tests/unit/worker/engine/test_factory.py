"""Configurations that an engine refuses before it loads anything."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.engine.factory import device_of
from specdecode_worker.models.errors import ModelError


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == device_of("cpu").type == "cpu"
    with pytest.raises(ModelError, match="torch sees none here"):
        device_of("cuda")
