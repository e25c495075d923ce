"""The memory check for a draft that is loaded while another one runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from specdecode_worker.contract import DraftConfig, Method
from specdecode_worker.engine import memory as device_memory
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.engine.memory import CheckedDraftLoader, free_bytes
from specdecode_worker.models.errors import ModelError
from support.worker.small_folders import config_of, write_head, write_target

CPU = torch.device("cpu")


@pytest.fixture
def checked_loader(tmp_path: Path) -> CheckedDraftLoader:
    config = config_of(write_target(tmp_path / "target"), write_head(tmp_path / "head"), kv_cache_tokens=512)
    engine = load_engine(config, Path)
    assert isinstance(engine.load_draft, CheckedDraftLoader)
    return engine.load_draft


def test_a_draft_that_fits_is_loaded(checked_loader: CheckedDraftLoader, tmp_path: Path) -> None:
    draft = DraftConfig(method="eagle3", uri=str(write_head(tmp_path / "other")))
    assert checked_loader(draft, "code").state.name == "code"
    assert (
        dataclasses.replace(checked_loader, free_bytes=lambda: 0)(DraftConfig(method="ngram")).state.method == "ngram"
    )


def test_weights_and_cache_must_fit_into_free_memory(checked_loader: CheckedDraftLoader, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "other")
    draft = DraftConfig(method="eagle3", uri=str(folder))
    weights = (folder / "model.safetensors").stat().st_size
    cache = (512 + 16) * 2 * 2 * 8 * 4  # tokens, keys and values, heads, head size, bytes per fp32 value
    with pytest.raises(ModelError, match=r"needs 0\.00 GiB beside the draft"):
        dataclasses.replace(checked_loader, free_bytes=lambda: cache + weights // 2)(draft)
    dataclasses.replace(checked_loader, free_bytes=lambda: 2 * weights + cache)(draft)


@pytest.mark.parametrize("method", ["eagle", "dflash"])
def test_a_head_without_own_logits_is_refused_on_several_devices(
    checked_loader: CheckedDraftLoader, method: Method
) -> None:
    with pytest.raises(ModelError, match="split over 2"):
        dataclasses.replace(checked_loader, ranks=2)(DraftConfig(method=method, uri="file:///nowhere"))


def test_a_gpu_keeps_the_pool_of_its_graphs_and_the_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that took them would end the engine at the next long prompt."""
    sizes = [(1, (0, 0), 100, 40), (1, (0, 7), 1000, 0), (0, (0, 0), 500, 0)]  # memory of torch, of a graph, elsewhere
    names = ("device", "segment_pool_id", "total_size", "allocated_size")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [dict(zip(names, one, strict=True)) for one in sizes])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 80_000))
    assert free_bytes(torch.device("cuda", 1), 3_000) == 10_000 + 60 - 3_000


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_usage_of_the_container_is_subtracted(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert free_bytes(CPU, 2**40) == 300 * 1024
    (folder / limit).write_text("max")
    assert free_bytes(CPU, 2**40) == 900 * 1024
