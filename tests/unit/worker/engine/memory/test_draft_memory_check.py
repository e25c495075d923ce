"""The memory check for a draft that is loaded while another one runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from small_folders import config_of, write_head, write_target

from specdecode_worker.contract import DraftConfig
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.engine.memory import device_memory
from specdecode_worker.engine.memory.device_memory import free_now
from specdecode_worker.engine.memory.draft_memory_check import LoadBeside
from specdecode_worker.models.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture
def beside(tmp_path: Path) -> LoadBeside:
    config = config_of(write_target(tmp_path / "target"), write_head(tmp_path / "head"), kv_cache_tokens=512)
    engine = load_engine(config, Path)
    assert isinstance(engine.load_draft, LoadBeside)
    return engine.load_draft


def test_what_fits_beside_is_loaded(beside: LoadBeside, tmp_path: Path) -> None:
    draft = DraftConfig(method="eagle3", uri=str(write_head(tmp_path / "other")))
    assert beside(draft, "code").state.name == "code"
    assert dataclasses.replace(beside, free_bytes=lambda: 0)(DraftConfig(method="ngram")).state.method == "ngram"


def test_weights_and_cache_must_be_free(beside: LoadBeside, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "other")
    draft = DraftConfig(method="eagle3", uri=str(folder))
    weights = (folder / "model.safetensors").stat().st_size
    cache = (512 + 16) * 2 * 2 * 8 * 4  # tokens, keys and values, heads, head size, bytes per fp32 value
    with pytest.raises(ModelError, match=r"needs 0\.00 GiB beside the draft"):
        dataclasses.replace(beside, free_bytes=lambda: cache + weights // 2)(draft)
    dataclasses.replace(beside, free_bytes=lambda: 2 * weights + cache)(draft)


def test_a_head_without_logits_of_its_own_is_refused_over_devices(beside: LoadBeside) -> None:
    with pytest.raises(ModelError, match="split over 2"):
        dataclasses.replace(beside, ranks=2)(DraftConfig(method="eagle", uri="file:///nowhere"))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_containers_own_use_counts(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    folder, limit, usage = tmp_path, "memory.max", "memory.current"
    if version == "v1":
        folder, limit, usage = tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        folder.mkdir()
    (folder / limit).write_text(str(500 * 1024))
    (folder / usage).write_text(str(300 * 1024))
    (folder / "memory.stat").write_text(f"cache 5\ninactive_file {100 * 1024}\n")
    monkeypatch.setattr(device_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(device_memory, "MEMINFO", meminfo)
    assert free_now(CPU) == 300 * 1024
    (folder / limit).write_text("max")
    assert free_now(CPU) == 900 * 1024
