"""Folders of quantized targets, packed as the writers of each format do, and what their weights are in fp32.

Every packer is written after its source, element by element, and shares no code with the reader:

- GPTQ: AutoGPTQ ``nn_modules/qlinear/qlinear_cuda.py`` ``pack``; version 2 stores zero points as they are.
- AWQ: AutoAWQ ``modules/linear/gemm.py`` ``from_linear``, with ``order_map = [0, 2, 4, 6, 1, 3, 5, 7]``.
- FP8 and INT8 of compressed-tensors, ModelOpt, FBGEMM and transformers: number times scale; ``weight_scale_inv`` too.
- compressed-tensors: ``compressors/pack_quantized/helpers.py`` ``pack_to_int32``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.arch import causal_lm_config, new_network
from specdecode_worker.models.linear import Linear
from specdecode_worker.models.unloaded import meta_init

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LARGE = SHAPE | {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
"""Fields that targets of real size have in common."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of a quantized matrix [N, K]: the weight is (level - zero) * scale."""

    levels_NK: Tensor
    scale_NG: Tensor
    zero_NG: Tensor
    groups_K: Tensor
    """Group of each column."""

    @property
    def weight(self) -> Tensor:
        """The weight in fp32."""
        scale_NK = self.scale_NG.float()[:, self.groups_K]
        return (self.levels_NK.float() - self.zero_NG.float()[:, self.groups_K]) * scale_NK


Packer = Callable[[Numbers], dict[str, Tensor]]
Rounding = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""Function from a weight [N, K] to the tensors that store it, by the ends of their names, and their weight in fp32."""


def words(integers: Tensor, places: Sequence[int] = range(8), bits: int = 4) -> Tensor:
    """Pack unsigned integers along the last dimension; entry i of a word takes the bits at ``places[i]``."""
    count = 32 // bits
    parts = integers.long().reshape(*integers.shape[:-1], -1, count)
    packed = sum(parts[..., i] << bits * places[i] for i in range(count))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def gptq(numbers: Numbers, *, version: int = 1) -> dict[str, Tensor]:
    zero_GN = numbers.zero_NG.T - (1 if version == 1 else 0)
    return {
        "qweight": words(numbers.levels_NK).T.contiguous(),
        "qzeros": words(zero_GN),
        "scales": numbers.scale_NG.T.contiguous(),
        "g_idx": numbers.groups_K.to(torch.int32),
    }


def awq(numbers: Numbers) -> dict[str, Tensor]:
    """Return AWQ's tensors. ``order_map`` names, for each nibble, the column in it."""
    order_map = (0, 2, 4, 6, 1, 3, 5, 7)
    places = tuple(order_map.index(column) for column in range(8))
    return {
        "qweight": words(numbers.levels_NK.T, places),
        "qzeros": words(numbers.zero_NG.T, places),
        "scales": numbers.scale_NG.T.contiguous(),
    }


def pack_quantized(numbers: Numbers, *, symmetric: bool, ordered: bool = False) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words(numbers.levels_NK),
        "weight_scale": numbers.scale_NG,
        "weight_shape": torch.tensor(numbers.levels_NK.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(numbers.zero_NG.T).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = numbers.groups_K.to(torch.int32)
    return tensors


def int4(
    packer: Packer,
    *,
    group: int = 128,
    symmetric: bool = True,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Rounding:
    """Return the rounding to int4 that ``packer`` packs. ``ordered``: columns of a group are anywhere (act-order)."""

    def rounded(weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = weight_NK.shape[1]
        width = min(group, columns)
        groups_K = torch.arange(columns) // width
        if ordered:
            # matrices that read the same input share the order, which is that of its activations
            groups_K = groups_K[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        order_K = groups_K.argsort(stable=True)
        low_NG, high_NG = weight_NK.float()[:, order_K].unflatten(1, (-1, width)).aminmax(dim=-1)
        scale_NG = (torch.maximum(-low_NG, high_NG) / 7.5 if symmetric else (high_NG - low_NG) / 15).to(dtype)
        zero_NG = torch.full_like(low_NG, 8) if symmetric else (-low_NG / scale_NG.float()).round().clamp(1, 15)
        levels_NK = (weight_NK.float() / scale_NG.float()[:, groups_K]).round() + zero_NG[:, groups_K]
        numbers = Numbers(levels_NK.clamp(0, 15).long(), scale_NG, zero_NG.long(), groups_K)
        return packer(numbers), numbers.weight

    return rounded


def scaled(
    scales: str, *, dtype: torch.dtype = torch.float32, name: str = "weight_scale", integers: bool = False
) -> Rounding:
    """Return the rounding to fp8, or int8, with a scale of all, of each row, or of each block of 128 by 128."""

    def rounded(weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight_NK.shape
        high, width = {"rows": (1, columns), "blocks": (128, 128)}.get(scales, (rows, columns))
        padded_NK = F.pad(weight_NK.float().abs(), (0, -columns % width, 0, -rows % high))
        largest = padded_NK.unflatten(1, (-1, width)).unflatten(0, (-1, high)).amax((1, 3))
        scale = (largest / (127 if integers else 448)).to(dtype)
        wide_NK = scale.float().repeat_interleave(high, 0).repeat_interleave(width, 1)[:rows, :columns]
        levels_NK = weight_NK.float() / wide_NK
        if integers:
            stored_NK = levels_NK.round().clamp(-127, 127).to(torch.int8)
        else:
            stored_NK = levels_NK.clamp(-448, 448).to(torch.float8_e4m3fn)
        shape: tuple[int, ...] = {"scalar": (), "tensor": (1,)}.get(scales, tuple(scale.shape))
        return {"weight": stored_NK, name: scale.reshape(shape)}, stored_NK.float() * wide_NK

    return rounded


def nvfp4(*, modelopt: bool = False) -> Rounding:
    """Return the rounding to NVFP4, as compressed-tensors or ModelOpt name and scale it.

    After compressed-tensors ``compressors/nvfp4/helpers.py``, ``pack_fp4_to_uint8``: index of the magnitude in a table,
    bit 3 for the sign, the first of two in the low bits.
    """
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))

    def rounded(weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values_NK = weight_NK.float()
        whole = (6 * 448 / values_NK.abs().amax()).reshape(1)
        scale = (values_NK.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        wide = scale.float() * (1 / whole) if modelopt else scale.float() / whole
        wide_NK = wide.repeat_interleave(16, 1)
        levels_NK = values_NK / wide_NK
        codes = torch.bucketize(levels_NK.abs(), (table[1:] + table[:-1]) / 2)
        packed = codes + 8 * (levels_NK < 0)
        packed = (packed[:, 0::2] + 16 * packed[:, 1::2]).to(torch.uint8)
        if modelopt:
            named = {"weight": packed, "weight_scale_2": (1 / whole).reshape(())}
        else:
            named = {"weight_packed": packed, "weight_global_scale": whole}
        return named | {"weight_scale": scale}, table[codes] * levels_NK.sign() * wide_NK

    return rounded


def write_quantized(
    folder: Path,
    rounding: Rounding,
    quantization: dict[str, Any],
    *,
    plain: tuple[str, ...] = (),
    rename: Callable[[str], str] = str,
    source: Path | None = None,
    **changed: Any,
) -> dict[str, Tensor]:
    """Write a target whose blocks have quantized matrices, and return the weights of the network in fp32.

    Weights are those of the folder ``source``, or random. ``plain`` names matrices that stay plain, by the last part of
    their names. ``rename`` returns names in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = (SHAPE if source is None else json.loads((source / "config.json").read_text())) | changed
    with meta_init():
        model = new_network(causal_lm_config(config))
    matrices = {f"model.layers.{name}": one for name, one in model.model.layers.named_modules()}
    matrices = {name: one for name, one in matrices.items() if isinstance(one, Linear)}
    if source is None:
        generator = torch.Generator().manual_seed(11)
        weights = {
            name: 0.1 * torch.randn(tensor.shape, generator=generator) + (1.0 if tensor.dim() == 1 else 0.0)
            for name, tensor in model.state_dict().items()
        }
        for index, name in enumerate(matrices):
            weights[f"{name}.weight"] *= 1 + index % 3  # so that scales of q, k and v differ
    else:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    stored = dict(weights)
    for name in matrices:
        if name.rpartition(".")[2] not in plain:
            tensors, weights[f"{name}.weight"] = rounding(stored.pop(f"{name}.weight"))
            stored |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    save_file({rename(name): tensor for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return weights


def write_sparse(
    folder: Path, config: dict[str, Any], form: str, *, part: str = "_proj.", max_model_len: int | None = None
) -> None:
    """Write a target of real size without its numbers: a header, and a file without blocks on the disk.

    ``form`` is that of the matrices with ``part`` in their names, but for routers: bf16, fp8 (scales of rows) or awq
    (groups of 128). All else is in bf16.
    """
    with meta_init():
        network = new_network(causal_lm_config(config, max_model_len))
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name, tensor in network.state_dict().items():
        if form == "bf16" or part not in name or ".router." in name:
            tensors[name] = ("BF16", list(tensor.shape))
            continue
        rows, columns = tensor.shape
        stored = {"weight": ("F8_E4M3", [rows, columns]), "weight_scale": ("BF16", [rows, 1])}
        if form == "awq":
            groups = columns // 128
            stored = {"qweight": ("I32", [columns, rows // 8]), "qzeros": ("I32", [groups, rows // 8])}
            stored["scales"] = ("F16", [groups, rows])
        tensors |= {f"{name.removesuffix('weight')}{suffix}": header for suffix, header in stored.items()}
    at, header = 0, {}
    for name, (dtype, sizes) in tensors.items():
        end = at + math.prod(sizes) * {"F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [at, end]}
        at = end
    written = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + at)
    (folder / "config.json").write_text(json.dumps(config))
