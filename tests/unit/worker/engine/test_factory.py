"""Configurations that an engine refuses before it loads anything, and parts that follow from the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specdecode_worker.contract import DraftConfig, EngineConfig
from specdecode_worker.core.kv_cache import FreeGaps, FreeList
from specdecode_worker.drafts.own_device_process import FolderDraft
from specdecode_worker.engine import factory
from specdecode_worker.engine.factory import _scheduler, device_of, load_engine
from specdecode_worker.engine.tensor_parallel import Assignment, load_rank_shard
from specdecode_worker.models.errors import ModelError
from support.worker.small_folders import config_of


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == device_of("cpu").type == "cpu"
    with pytest.raises(ModelError, match="torch sees none here"):
        device_of("cuda")


def test_blocks_are_kept_contiguous_on_cpus_alone() -> None:
    pools = {name: _scheduler(EngineConfig(), 0, 100, "target", torch.device(name))._pool for name in ("cpu", "cuda")}
    assert isinstance(pools["cpu"]._free, FreeGaps)
    assert isinstance(pools["cuda"]._free, FreeList)


def test_processes_with_gpus_have_the_threads_of_their_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one for each core of a large node, what torch computes on the host takes the time of the container at once.

    The container has eight cores, for two ranks.
    """

    def end(*_: Any, **__: Any) -> None:
        raise ModelError("no GPU is needed before")

    counts: list[int] = []
    nowhere, cuda = Path("/nowhere"), torch.device("cuda", 1)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(factory, "device_of", lambda name: cuda)
    monkeypatch.setattr(factory, "cpu_limit", lambda: 8)
    monkeypatch.setattr(factory, "use_kernel_timings", end)
    monkeypatch.setattr(dist, "init_process_group", end)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    rank = Assignment(
        rank=1, size=2, meeting="", folder="", dtype="bfloat16", quantization=None, device="cuda", max_model_len=None,
        blocks=1, threads=4,
    )  # fmt: skip
    draft = FolderDraft(
        config=DraftConfig(uri=str(nowhere)), uri="", name="", target_folder=nowhere, max_model_len=8,
        dtype=torch.bfloat16, device=cuda, slots=1, blocks=1, threads=4,
    )  # fmt: skip
    for start in (
        lambda: load_engine(config_of(nowhere, threads=None, tensor_parallel_size=2), Path),
        lambda: load_rank_shard(rank),
        draft,
    ):
        with pytest.raises(ModelError):
            start()
    assert counts == [4, 4, 4]
