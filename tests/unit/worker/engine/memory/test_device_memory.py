"""The memory budget equals what an engine allocates, to the byte, and nothing is loaded that does not fit.

An engine also takes its device, the order of its blocks and its threads from where it runs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from specdecode_worker.contract import DraftConfig, EngineConfig, MemoryState, Method, NamedDraft
from specdecode_worker.core.kv_cache import FreeGaps, FreeList
from specdecode_worker.drafts.own_device_process import FolderDraft
from specdecode_worker.engine import factory
from specdecode_worker.engine import memory as device_memory
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import _scheduler, device_of, load_engine
from specdecode_worker.engine.memory import (
    CheckedDraftLoader,
    Device,
    Inventory,
    free_bytes,
    kv_cache_bytes,
    kv_tokens,
    make_verdict,
    take_inventory,
)
from specdecode_worker.engine.tensor_parallel import Assignment, load_rank_shard
from specdecode_worker.models.errors import CannotServe, ModelError
from support.worker.quantized_folders import awq, int4, write_quantized
from support.worker.small_engine import drain, plan_of, submit
from support.worker.small_folders import config_of, write_head, write_target, write_tokenizer

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head")


def storages(*modules: nn.Module | Tensor) -> int:
    """Return the bytes of all storage that modules and tensors hold, each counted once."""
    bytes_by_address: dict[int, int] = {}
    for module in modules:
        tensors = [module] if isinstance(module, Tensor) else [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            bytes_by_address[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(bytes_by_address.values())


def drafters(engine: Engine) -> list[Any]:
    return [loaded.drafter for loaded in engine._drafts._drafts.values()]


def memory(engine: Engine) -> MemoryState:
    state = engine.report().memory
    assert state is not None
    return state


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantized", [False, True], ids=["", "quantized"])
def test_weights_and_tables_match_the_loaded_model(
    tmp_path: Path, tied: bool, dtype: str, quantized: bool, monkeypatch: Any
) -> None:
    """Weights in bf16 are not packed here, because packed matrices are opaque; they have the same size.

    On a CPU quantized weights are stored as plain ones. For a GPU only the calculation is checked.
    """
    monkeypatch.setattr("specdecode_worker.models.optimize.should_pack", lambda dtype, device: False)
    monkeypatch.setattr("specdecode_worker.engine.memory.should_pack", lambda dtype, device: False)
    folder = write_target(tmp_path / "t", tie_word_embeddings=tied)
    formats = ("int8", "int4") if quantized else (None, None)
    config = config_of(folder, write_head(tmp_path / "h"), model={"dtype": dtype, "quantization": formats[0]})
    config = config.model_copy(update={"draft": config.draft.model_copy(update={"quantization": formats[1]})})
    engine = load_engine(config, Path)
    budget = take_inventory(config, Path, CPU).budget
    (drafter,) = drafters(engine)
    assert memory(engine).weights + budget.target.tables == storages(engine._target._model)
    assert memory(engine).drafts + budget.drafts[0].tables == storages(drafter._head)
    assert (memory(engine).weights, memory(engine).drafts) == (budget.target.weights, budget.draft_weights)
    assert budget.drafts[0].tables == budget.target.tables == 2 * 256 * 8 * 4
    gpu = Device(kind="cuda", limit=GIB, free=GIB, source="GPU memory")
    there = take_inventory(config, Path, torch.device("cuda"), gpu).budget
    assert (there.target.weights < budget.target.weights) is quantized
    assert (there.draft_weights < budget.draft_weights) is quantized


def test_a_packed_tied_matrix_counts_twice(tmp_path: Path, monkeypatch: Any) -> None:
    config = config_of(write_target(tmp_path / "t", tie_word_embeddings=True), model={"dtype": "bfloat16"})
    sizes = []
    for packed in (False, True):
        monkeypatch.setattr("specdecode_worker.engine.memory.should_pack", lambda dtype, device, packed=packed: packed)
        sizes.append(take_inventory(config, Path, CPU).budget.target.weights)
    assert sizes[1] - sizes[0] == 97 * 32 * 2


def test_heads_too_wide_for_the_kernels_of_a_gpu_are_refused_before_loading(tmp_path: Path, target: Path) -> None:
    cuda, gpu = torch.device("cuda"), Device(kind="cuda", limit=80 * GIB, free=80 * GIB, source="GPU memory")
    wide = config_of(write_target(tmp_path / "wide", head_dim=136))
    assert take_inventory(wide, Path, CPU).budget.fits
    with pytest.raises(ModelError, match="head_dim 136 of the target is not served on a GPU"):
        take_inventory(wide, Path, cuda, gpu)
    drafted = config_of(target, write_head(tmp_path / "head", head_dim=136))
    verdict = make_verdict(take_inventory(drafted, Path, cuda, gpu))
    assert verdict.serves
    assert "head_dim 136 of the draft" in (verdict.draft_problem or "")


def test_a_draft_that_is_quantized_already_leaves_the_worker_without_it(tmp_path: Path, target: Path) -> None:
    write_quantized(tmp_path / "draft", int4(awq, symmetric=False), {"quant_method": "awq"})
    for folder in (target, tmp_path / "draft"):
        write_tokenizer(folder)
    draft = DraftConfig(method="draft-model", uri=str(tmp_path / "draft"), quantization="int8")
    verdict = make_verdict(take_inventory(config_of(target).model_copy(update={"draft": draft}), Path, CPU))
    assert verdict.serves
    assert "is quantized already" in (verdict.draft_problem or "")


def test_own_embeddings_count_for_the_draft(tmp_path: Path, target: Path, head: Path) -> None:
    own = write_head(tmp_path / "own", own_embedding=True)
    sizes = [take_inventory(config_of(target, each), Path, CPU).budget.draft_weights for each in (head, own)]
    assert sizes[1] - sizes[0] == 97 * 32 * 4


@pytest.mark.parametrize("tokens", [None, 1000])
def test_the_caches_have_the_computed_size(target: Path, head: Path, tokens: int | None) -> None:
    config = config_of(target, head, kv_cache_tokens=tokens)
    engine = load_engine(config, Path)
    budget = take_inventory(config, Path, CPU).budget
    made = engine._target.cache.data.nbytes + sum(each._cache.data.nbytes for each in drafters(engine))
    made += engine._state.block_aux_NA.nbytes
    assert memory(engine).kv_cache == made == kv_cache_bytes(budget, kv_tokens(budget))
    assert engine.report().kv_tokens_total == kv_tokens(budget)
    assert (memory(engine).limit, memory(engine).reserve) == (budget.device.limit, budget.reserve)


def test_several_drafts_each_bring_weights_and_a_cache(tmp_path: Path, target: Path, head: Path) -> None:
    small = write_target(tmp_path / "small", num_hidden_layers=1)
    write_tokenizer(target)
    write_tokenizer(small)
    misfit = write_head(tmp_path / "misfit", target={"vocab_size": 98}, vocab_size=98)
    more = (
        NamedDraft(name="code", method="draft-model", uri=str(small)),
        NamedDraft(name="prose", method="ngram"),
        NamedDraft(name="other", method="eagle3", uri=str(misfit)),
    )
    config = config_of(target, head).model_copy(update={"drafts": more})
    engine, inventory = load_engine(config, Path), take_inventory(config, Path, CPU)
    assert [draft.name for draft in inventory.budget.drafts] == ["draft", "draft code"]
    first, second, _ = drafters(engine)
    made = engine._target.cache.data.nbytes + first._cache.data.nbytes + second._cache.data.nbytes
    assert memory(engine).kv_cache == made + engine._state.block_aux_NA.nbytes
    tables = sum(draft.tables for draft in inventory.budget.drafts)
    assert memory(engine).drafts + tables == storages(first._head) + storages(second._model)
    assert (inventory.draft_problem or "").startswith("draft other: ")
    assert make_verdict(inventory).serves


@pytest.mark.parametrize("draft", [True, False])
def test_the_computed_slot_state_matches_the_allocation(target: Path, head: Path, draft: bool) -> None:
    config = config_of(target, head if draft else None, max_num_seqs=7, model={"max_model_len": 131})
    engine, budget = load_engine(config, Path), take_inventory(config, Path, CPU).budget
    slot_tensors = [v for k, v in vars(engine._state).items() if isinstance(v, Tensor) and k != "block_aux_NA"]
    tables = budget.target.tables + sum(each.tables for each in budget.drafts)
    assert budget.state == storages(*slot_tensors) + tables


def test_a_mismatched_draft_takes_no_memory_and_is_reported_as_at_loading(tmp_path: Path, target: Path) -> None:
    narrow = write_head(tmp_path / "narrow", intermediate_size=40)
    (narrow / "config.json").write_text((narrow / "config.json").read_text().replace("40", "48", 1))
    config = config_of(target, narrow)
    verdict = make_verdict(take_inventory(config, Path, CPU))
    assert (verdict.serves, verdict.memory.drafts) == (True, 0)
    assert "midlayer.mlp" in (verdict.draft_problem or "")
    engine = load_engine(config, Path)
    assert engine.report().draft.problem == verdict.draft_problem
    needed = config.model_copy(update={"draft": config.draft.model_copy(update={"required": True})})
    with pytest.raises(CannotServe, match=r"midlayer\.mlp"):
        load_engine(needed, Path)


def small_device(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    device = Device(kind="cpu", limit=size, free=size, source="container's memory limit")
    monkeypatch.setattr("specdecode_worker.engine.memory.device_memory", lambda kind, count: device)


def test_nothing_is_loaded_when_it_cannot_fit(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_device(monkeypatch, GIB // 4)
    monkeypatch.setattr(factory, "load_causal_lm", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(CannotServe, match=r"limit of 0\.25 GiB leaves no room") as caught:
        load_engine(config_of(target), Path)
    assert "- weights of the target" in str(caught.value)
    assert not caught.value.verdict.serves


def test_the_engine_stays_within_the_container_limit(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(target, head, max_num_seqs=64, model={"max_model_len": 200})
    generous = take_inventory(config, Path, CPU).budget
    wanted = generous.spent + 20 * 200 * generous.bytes_per_token
    small_device(monkeypatch, int(wanted / 0.8))
    engine = load_engine(config, Path)
    assert 15 * 200 < engine.report().kv_tokens_total < 20 * 200
    engine.set_plan(plan_of("chain:3", draft=engine.report().draft.hash))
    for index in range(40):
        engine.add(submit(str(index), max_tokens=30))
    assert {tokens.finish for tokens in drain(engine) if tokens.finish} == {"length"}


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "2147483648\n", 2 * GIB),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
    ],
)
def test_memory_limit_is_read_from_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, limit: int | None
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  6291456 kB\n")
    monkeypatch.setattr(device_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(device_memory, "MEMINFO", meminfo)
    device = device_memory.device_memory(CPU)
    assert device.limit == (limit or 8 * GIB)
    assert device.free == (limit or 6 * GIB)
    assert ("container" in device.source) == (limit is not None)


def test_the_gpu_with_the_least_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((70 - 30 * index) * GIB, 80 * GIB))
    device = device_memory.device_memory(torch.device("cuda"), 2)
    assert (device.limit, device.free, device.count) == (80 * GIB, 40 * GIB, 2)
    with pytest.raises(ModelError, match="torch sees 2 GPUs"):
        device_memory.device_memory(torch.device("cuda"), 4)


def test_the_gpu_of_a_draft_bounds_the_caches(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one behind those of the target. A draft that it has no room for leaves the target its own."""
    small = write_target(tmp_path / "small")
    for folder in (target, small):
        write_tokenizer(folder)
    draft = DraftConfig(method="draft-model", uri=str(small), placement="own")
    config = config_of(target, max_num_seqs=1).model_copy(update={"draft": draft})

    def inventory(*gib: float, **changed: Any) -> Inventory:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gib))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (int(gib[index] * GIB), int(gib[index] * GIB)))
        placed = config.model_copy(update={"draft": draft.model_copy(update=changed)})
        return take_inventory(placed, Path, torch.device("cuda"))

    bounded, ample, alone = inventory(80, 8).budget, inventory(80, 80).budget, inventory(80).budget
    assert bounded.own is not None
    assert kv_tokens(bounded) == bounded.own.room_tokens < kv_tokens(ample) == kv_tokens(alone)
    refused = inventory(80, 0.5)
    assert kv_tokens(refused.budget) == kv_tokens(alone)
    assert (refused.draft_problem or "").startswith("the memory of the draft's GPU of 0.50 GiB leaves no room")
    assert make_verdict(refused).serves
    assert not make_verdict(inventory(80, 0.5, required=True)).serves

    def broken(index: int) -> tuple[int, int]:
        if index:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return 80 * GIB, 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert kv_tokens(take_inventory(config, Path, torch.device("cuda")).budget) == kv_tokens(alone)


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
    """With a thread for each core of a large node, torch would use up the container's CPU quota, and be throttled.

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
        config=DraftConfig(uri=str(nowhere)), name="", target_folder=nowhere, max_model_len=8,
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
