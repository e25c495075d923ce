"""Targets in the quantized formats of others: their weights, products, splits over ranks, sizes and refusals.

Wanted weights are computed by the packers in support/worker/quantized_folders.py, from the numbers before packing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdecode_kernels.rope_cache.reference import Scales
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, WorkerConfig
from specdecode_worker.engine.memory import Device, Inventory, take_inventory
from specdecode_worker.models import collectives
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.errors import ConfigMismatch, ModelError, WeightMismatch
from specdecode_worker.models.linear import QuantizedWeight, SeparateWeights, Shard
from specdecode_worker.models.optimize import added_bytes, fuse
from specdecode_worker.models.tensor_parallel import load_shard, split_network
from specdecode_worker.models.weights import load_causal_lm, prepare_causal_lm
from support.worker.dense_attention import dense
from support.worker.quantized_folders import (
    LARGE,
    Rounding,
    awq,
    gptq,
    int4,
    nvfp4,
    pack_quantized,
    scaled,
    words,
    write_quantized,
    write_sparse,
)
from support.worker.small_folders import change
from support.worker.thread_ranks import ThreadRanks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS_T = torch.arange(9) * 7 % 97


@dataclass(frozen=True)
class Case:
    """Rounding of matrices, and the config that names their format."""

    rounding: Rounding
    config: dict[str, Any]


def gptq_case(version: int = 1, **numbers: Any) -> Case:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "sym": numbers.get("symmetric", True),
        "desc_act": numbers.get("ordered", False),
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Case(int4(partial(gptq, version=version), **numbers), config)


def packed_case(**numbers: Any) -> Case:
    packer = partial(pack_quantized, symmetric=numbers.get("symmetric", True), ordered=numbers.get("ordered", False))
    return Case(int4(packer, **numbers), {"quant_method": "compressed-tensors", "format": "pack-quantized"})


WHOLE_ROW = 2**20
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
INT4 = {
    "gptq": gptq_case(),
    "gptq 32": gptq_case(group=32),
    "gptq rows": gptq_case(group=WHOLE_ROW),
    "gptq asymmetric": gptq_case(group=64, symmetric=False),
    "gptq v2": gptq_case(2, symmetric=False),
    "gptq act-order": gptq_case(ordered=True),
    "gptq v2 act-order": gptq_case(2, group=32, symmetric=False, ordered=True),
    "awq": Case(int4(awq, symmetric=False), AWQ),
    "awq 64": Case(int4(awq, group=64, symmetric=False), AWQ),
    "packed": packed_case(dtype=torch.bfloat16),
    "packed 32": packed_case(group=32),
    "packed rows": packed_case(group=WHOLE_ROW, dtype=torch.float32),
    "packed asymmetric": packed_case(symmetric=False),
    "packed act-order": packed_case(group=64, ordered=True),
}
PACKED_FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
EIGHT_BITS = {
    "fp8 rows": Case(scaled("rows", dtype=torch.bfloat16), PACKED_FLOATS),
    "fp8 tensor": Case(scaled("tensor", dtype=torch.bfloat16), PACKED_FLOATS),
    "modelopt fp8": Case(scaled("scalar"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fbgemm": Case(scaled("rows"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8 blocks": Case(scaled("blocks", dtype=torch.bfloat16), PACKED_FLOATS),
    "fp8 inverse": Case(scaled("blocks", name="weight_scale_inv"), {"quant_method": "fp8"}),
    "int8": Case(scaled("rows", dtype=torch.bfloat16, integers=True), {"quant_method": "compressed-tensors"}),
}
EIGHT_BITS |= {
    "nvfp4": Case(nvfp4(), {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "modelopt nvfp4": Case(nvfp4(modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}
CASES = {**INT4, **EIGHT_BITS}
FORMATS = pytest.mark.parametrize("name", CASES)


def written(folder: Path, name: str, **changed: Any) -> dict[str, Tensor]:
    return write_quantized(folder, CASES[name].rounding, CASES[name].config, **changed)


@torch.inference_mode()
def logits(model: CausalLM) -> Tensor:
    return model.logits(model(TOKENS_T, torch.arange(len(TOKENS_T)), dense).hidden_TE)


def has_equal_weights(folder: Path, weights: dict[str, Tensor]) -> bool:
    loaded = load_causal_lm(folder, dtype=torch.float32, device=CPU).state_dict()
    return loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)


def agrees(folder: Path, weights: dict[str, Tensor], *, size: int, monkeypatch: Any) -> bool:
    """Return whether the stored and fused network, split over ``size`` ranks, computes what the weights do."""
    ranks = ThreadRanks(size)
    monkeypatch.setattr(collectives, "dist", ranks)

    def work(rank: int) -> Tensor:
        if size == 1:
            model = load_causal_lm(folder, dtype=torch.float64, device=CPU, stored=True)
        else:
            model = load_shard(folder, Shard(rank, size), dtype=torch.float64, device=CPU, stored=True)
        assert any(isinstance(module, QuantizedWeight) for module in model.modules())
        fuse(model)
        return logits(model)

    plain = prepare_causal_lm(folder).network
    plain.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, assign=True)
    return torch.allclose(ranks.run(work)[0], logits(plain), rtol=1e-9, atol=1e-9)


@FORMATS
def test_weights_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    assert has_equal_weights(tmp_path, written(tmp_path, name))


@FORMATS
@pytest.mark.parametrize("size", [1, 2])
def test_stored_matrices_compute_what_their_weights_do(name: str, size: int, tmp_path: Path, monkeypatch: Any) -> None:
    assert agrees(tmp_path, written(tmp_path, name), size=size, monkeypatch=monkeypatch)


@pytest.mark.parametrize("name", ["gptq 32", "awq", "packed asymmetric", "fp8 blocks"])
def test_ranks_may_begin_within_a_group(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Part of a group keeps its scale: 384 channels on two ranks are one group of 128 and half of another."""
    weights = written(tmp_path, name, intermediate_size=384)
    assert agrees(tmp_path, weights, size=2, monkeypatch=monkeypatch)


def test_ranks_may_share_key_value_heads(tmp_path: Path, monkeypatch: Any) -> None:
    weights = written(tmp_path, "awq", num_key_value_heads=1)
    assert agrees(tmp_path, weights, size=2, monkeypatch=monkeypatch)


def test_plain_and_quantized_projections_may_be_joined(tmp_path: Path, monkeypatch: Any) -> None:
    weights = written(tmp_path, "awq", plain=("v_proj", "up_proj"), attention_bias=True, mlp_bias=True)
    assert agrees(tmp_path, weights, size=2, monkeypatch=monkeypatch)
    model = load_causal_lm(tmp_path, dtype=torch.float64, device=CPU, stored=True)
    fuse(model)
    assert sum(isinstance(module, SeparateWeights) for module in model.modules()) == 4


@FORMATS
@pytest.mark.parametrize("size", [1, 2])
def test_predicted_bytes_are_exact(name: str, size: int, tmp_path: Path) -> None:
    """The sum of `check` is what loaded matrices take on a GPU, where they stay quantized, and on a CPU."""
    written(tmp_path, name)
    shard = Shard(0, size)

    def held(stored: bool) -> int:
        model = load_shard(tmp_path, shard, dtype=torch.bfloat16, device=CPU, stored=stored)
        return sum(tensor.nbytes for tensor in model.state_dict().values())

    part = split_network(prepare_causal_lm(tmp_path).network, shard)
    assert added_bytes(part, None, torch.bfloat16, CUDA, draft=False) == held(True) - held(False)
    assert added_bytes(part, None, torch.bfloat16, CPU, draft=False) == 0


O_PROJ = "model.layers.1.self_attn.o_proj"


def test_symmetric_zero_points_are_decided_by_their_words(tmp_path: Path) -> None:
    """Files that say `gptq` with zero points of version 2 exist; other words than the middle are refused."""
    weights = written(tmp_path, "gptq")
    words = load_file(tmp_path / "model.safetensors")[f"{O_PROJ}.qzeros"]
    assert (words == 0x77777777).all()
    change(tmp_path, **{f"{O_PROJ}.qzeros": torch.full_like(words, 0x88888888 - 2**32)})
    assert has_equal_weights(tmp_path, weights)
    words[0, 1] += 16
    change(tmp_path, **{f"{O_PROJ}.qzeros": words})
    with pytest.raises(WeightMismatch, match=r"o_proj\.qzeros has zero points, but the config says sym"):
        load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)


def test_symmetric_integers_of_8_bits_are_read(tmp_path: Path) -> None:
    """GPTQ and pack-quantized of 8 bits store integers plus 128."""

    def rounding(weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight_NK.shape
        scale = (weight_NK.unflatten(1, (-1, 32)).abs().amax(-1) / 127).half()
        wide_NK = scale.float().repeat_interleave(32, dim=1)
        levels = (weight_NK / wide_NK).round().clamp(-128, 127).long() + 128
        weight = (levels - 128).float() * wide_NK
        if rows == columns:
            return {"weight_packed": words(levels, bits=8), "weight_scale": scale}, weight
        zeros = torch.full((columns // 32, rows), 127)
        return {
            "qweight": words(levels, bits=8).T.contiguous(),
            "qzeros": words(zeros, bits=8),
            "scales": scale.T.contiguous(),
        }, weight

    assert has_equal_weights(tmp_path, write_quantized(tmp_path, rounding, {"quant_method": "gptq", "bits": 8}))


def test_zero_points_of_minus_one_are_refused(tmp_path: Path) -> None:
    """Writers of version 1 packed a zero point of 0 as -1, which sets the bits of its neighbors."""
    written(tmp_path, "gptq asymmetric")
    words = load_file(tmp_path / "model.safetensors")[f"{O_PROJ}.qzeros"]
    words[0, 1] |= -(2**12)
    change(tmp_path, **{f"{O_PROJ}.qzeros": words})
    with pytest.raises(WeightMismatch, match="export with checkpoint_format gptq_v2"):
        load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)


def test_biases_of_zero_and_scales_of_activations_are_spare(tmp_path: Path) -> None:
    weights = written(tmp_path, "gptq")
    spare = {f"{O_PROJ}.input_scale": torch.ones(1), "model.layers.0.self_attn.attn.k_scale": torch.ones(())}
    change(tmp_path, **spare, **{f"{O_PROJ}.bias": torch.zeros(256)})
    assert has_equal_weights(tmp_path, weights)
    change(tmp_path, **{f"{O_PROJ}.bias": torch.ones(256)})
    with pytest.raises(WeightMismatch, match=r"o_proj\.bias is not 0"):
        load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)


def test_scales_of_a_kv_cache_are_read(tmp_path: Path) -> None:
    """Under the names of compressed-tensors, vLLM, AutoFP8 (one for both, and of outputs) and ModelOpt."""
    weights = written(tmp_path, "gptq")
    first, second = (f"model.layers.{layer}.self_attn" for layer in range(2))
    change(tmp_path, **{f"{first}.k_scale": torch.tensor([0.5]), f"{first}.v_proj.output_scale": torch.tensor(0.25)})
    change(
        tmp_path, **{f"{first}.attn.q_scale": torch.tensor(9.0), f"{second}.kv_scale": torch.tensor(0.125).bfloat16()}
    )
    assert has_equal_weights(tmp_path, weights)
    scales = prepare_causal_lm(tmp_path).network.kv_scales
    assert scales == (Scales(0.5, 0.25), Scales(0.125, 0.125))
    change(tmp_path, **{f"{second}.k_proj.k_scale": torch.tensor(2.0), f"{second}.v_proj.v_scale": torch.tensor(4.0)})
    change(tmp_path, **{f"{second}.kv_scale": None, f"{first}.k_scale": torch.ones(2)})
    scales = prepare_causal_lm(tmp_path).network.kv_scales
    assert scales[1] == Scales(2.0, 4.0)
    with pytest.raises(ModelError, match="leave kv_cache_dtype auto"):
        inventory(tmp_path, "fp8")
    assert inventory(tmp_path, "auto").budget.fits


def inventory(folder: Path, kv_cache_dtype: Any) -> Inventory:
    model, engine = ModelConfig(uri=str(folder), served_name="m"), EngineConfig(kv_cache_dtype=kv_cache_dtype)
    return take_inventory(WorkerConfig(model=model, draft=DraftConfig(method="none"), engine=engine), Path, CPU)


E5M2 = torch.ones(256, 256).to(torch.float8_e5m2)
REFUSED: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("gptq", {"qzeros": None}, r"o_proj\.qzeros is missing"),
    ("gptq", {"scales": torch.ones(2, 64)}, r"o_proj\.scales has shape \[2, 64\], GPTQ needs \[2, 256\]"),
    ("gptq", {"qweight": torch.zeros(24, 256, dtype=torch.int32)}, "integers of 3 bits; 4 and 8 are read, take"),
    ("gptq", {"surplus": torch.zeros(1)}, r"o_proj\.surplus is not part of this model"),
    ("gptq act-order", {"g_idx": torch.zeros(256, dtype=torch.int32)}, "does not name 128 columns for each of 2"),
    ("awq", {"scales": torch.ones(16, 256), "qzeros": torch.zeros(16, 32, dtype=torch.int32)}, "groups of 16 inputs"),
    ("fp8 rows", {"weight_scale": None}, r"o_proj\.weight_scale is missing"),
    ("fp8 rows", {"weight_scale": torch.ones(256, 8, dtype=torch.uint8)}, r"weight_scale is of MXFP4 or MXFP8"),
    ("fp8 rows", {"weight": E5M2}, r"o_proj\.weight is of FP8 e5m2, which is not"),
    ("fp8 blocks", {"weight_scale": torch.ones(2, 7)}, r"has 7 entries for 256 columns"),
    ("int8", {"weight_zero_point": torch.ones(256, 1, dtype=torch.int8)}, r"o_proj\.weight_zero_point is not 0"),
    (
        "packed",
        {"SCB": torch.ones(256)},
        "is of bitsandbytes, which is not read; take it in bf16, in FP8, in NVFP4, or in int4",
    ),
    ("packed", {"weight.absmax": torch.ones(256)}, "is of bitsandbytes"),
    ("nvfp4", {"weight_global_scale": torch.ones(2)}, "weight_global_scale is not one number"),
    ("nvfp4", {"weight_global_scale": None}, "weight_scale_2 is missing"),
    ("nvfp4", {"weight_scale": torch.ones(256, 16)}, "has dtype F32, expected F8_E4M3"),
    ("packed", {"meta": torch.zeros(1)}, "is of 2:4 sparse"),
]


@pytest.mark.parametrize(("name", "changed", "words"), REFUSED)
def test_other_tensors_are_refused_by_name(
    name: str, changed: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    written(tmp_path, name)
    change(tmp_path, **{f"{O_PROJ}.{suffix}": tensor for suffix, tensor in changed.items()})
    with pytest.raises(WeightMismatch, match=words):
        load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes' is not read; take"),
        ({"quant_method": "gguf"}, "quant_method 'gguf' is not read"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' is not read"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}, "rotates activations"),
    ],
)
def test_other_methods_are_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["awq"].rounding, config)
    with pytest.raises(ConfigMismatch, match=words):
        prepare_causal_lm(tmp_path)


def test_the_config_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    weights = written(tmp_path, "gptq v2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_equal_weights(tmp_path, weights)


def test_a_split_within_the_smallest_group_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "packed 32", intermediate_size=480)
    with pytest.raises(WeightMismatch, match="cannot be split at input 240; take another tensor_parallel_size"):
        load_shard(tmp_path, Shard(0, 2), dtype=torch.float32, device=CPU)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    written(tmp_path, "awq")
    with pytest.raises(ConfigMismatch, match="is quantized already; leave `quantization` out"):
        added_bytes(prepare_causal_lm(tmp_path).network, "int8", torch.bfloat16, CPU, draft=False)


SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "form", "gpus", "weights", "fits"),
    [
        ("8b", "fp8", 1, 8.46, True),
        ("70b", "fp8", 1, 67.69, False),
        ("70b", "fp8", 2, 34.83, True),
        ("70b", "awq", 1, 37.29, True),
        ("405b", "fp8", 4, 98.45, False),
        ("405b", "fp8", 8, 51.19, True),
    ],
)
def test_targets_of_real_size_are_budgeted_from_their_headers(
    size: str, form: str, gpus: int, weights: float, fits: bool, tmp_path: Path
) -> None:
    """GPUs of 80 GB, texts of 8,192 tokens; embeddings are in bf16 on each, the output matrix is split."""
    write_sparse(tmp_path / "target", LARGE | SIZES[size], form)
    model = ModelConfig(uri=str(tmp_path / "target"), served_name="m", max_model_len=8192)
    engine = EngineConfig(device="cuda", tensor_parallel_size=gpus)
    config = WorkerConfig(model=model, draft=DraftConfig(method="none"), engine=engine)
    memory = Device(kind="cuda", limit=79 * 2**30, free=79 * 2**30, source="GPU memory", count=gpus)
    budget = take_inventory(config, Path, CUDA, memory).budget
    assert budget.target.weights / 2**30 == pytest.approx(weights, abs=0.01)
    assert budget.fits == fits
