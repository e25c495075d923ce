"""The memory budget equals what an engine allocates, to the byte, and nothing is loaded that does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdecode_worker.contract import DraftConfig, EngineConfig, MemoryState, Method, NamedDraft
from specdecode_worker.core.kv_cache import FreeGaps, FreeList
from specdecode_worker.engine import factory
from specdecode_worker.engine import memory as device_memory
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import _scheduler, device_of, load_engine
from specdecode_worker.engine.memory import (
    CheckedDraftLoader,
    Device,
    free_bytes,
    kv_cache_bytes,
    kv_tokens,
    make_verdict,
    take_inventory,
)
from specdecode_worker.models.errors import CannotServe, ModelError
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
def test_weights_and_tables_match_the_loaded_model(tmp_path: Path, tied: bool, dtype: str, monkeypatch: Any) -> None:
    """Weights in bf16 are not packed here, because packed matrices are opaque; they have the same size."""
    monkeypatch.setattr("specdecode_worker.models.optimize.should_pack", lambda dtype, device: False)
    monkeypatch.setattr("specdecode_worker.engine.memory.should_pack", lambda dtype, device: False)
    folder = write_target(tmp_path / "t", tie_word_embeddings=tied)
    config = config_of(folder, write_head(tmp_path / "h"), model={"dtype": dtype})
    engine = load_engine(config, Path)
    budget = take_inventory(config, Path, CPU).budget
    (drafter,) = drafters(engine)
    assert memory(engine).weights + budget.target.tables == storages(engine._target._model)
    assert memory(engine).drafts + budget.drafts[0].tables == storages(drafter._head)
    assert budget.drafts[0].tables == budget.target.tables == 2 * 256 * 8 * 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_are_counted_at_their_stored_size(
    tmp_path: Path, tied: bool, dtype: str, monkeypatch: Any
) -> None:
    """On a CPU they are stored as plain weights. For a GPU only the calculation is checked."""
    monkeypatch.setattr("specdecode_worker.models.optimize.should_pack", lambda dtype, device: False)
    monkeypatch.setattr("specdecode_worker.engine.memory.should_pack", lambda dtype, device: False)
    folder, head = write_target(tmp_path / "t", tie_word_embeddings=tied), write_head(tmp_path / "h")
    plain = config_of(folder, head, model={"dtype": dtype})
    config = plain.model_copy(
        update={
            "model": plain.model.model_copy(update={"quantization": "int8"}),
            "draft": plain.draft.model_copy(update={"quantization": "int4"}),
        }
    )
    engine = load_engine(config, Path)
    budget = take_inventory(config, Path, CPU).budget
    (drafter,) = drafters(engine)
    assert budget.target.weights + budget.target.tables == storages(engine._target._model)
    assert budget.draft_weights + budget.drafts[0].tables == storages(drafter._head)
    gpu = Device(kind="cuda", limit=GIB, free=GIB, source="GPU memory")
    there = take_inventory(config, Path, torch.device("cuda"), gpu).budget
    assert there.target.weights < budget.target.weights
    assert there.draft_weights < budget.draft_weights


def test_a_packed_tied_matrix_counts_twice(tmp_path: Path, monkeypatch: Any) -> None:
    config = config_of(write_target(tmp_path / "t", tie_word_embeddings=True), model={"dtype": "bfloat16"})
    sizes = []
    for packed in (False, True):
        monkeypatch.setattr("specdecode_worker.engine.memory.should_pack", lambda dtype, device, packed=packed: packed)
        sizes.append(take_inventory(config, Path, CPU).budget.target.weights)
    assert sizes[1] - sizes[0] == 97 * 32 * 2


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
    assert free_bytes(CPU) == 300 * 1024
    (folder / limit).write_text("max")
    assert free_bytes(CPU) == 900 * 1024


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == device_of("cpu").type == "cpu"
    with pytest.raises(ModelError, match="torch sees none here"):
        device_of("cuda")


def test_blocks_are_kept_contiguous_on_cpus_alone() -> None:
    pools = {name: _scheduler(EngineConfig(), 0, 100, "target", torch.device(name))._pool for name in ("cpu", "cuda")}
    assert isinstance(pools["cpu"]._free, FreeGaps)
    assert isinstance(pools["cuda"]._free, FreeList)
