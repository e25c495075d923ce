"""Folders of small quantized targets, packed as the writers of each format do, and what their weights are in fp32.

Every packer is written after its source, element by element, and shares no code with the reader:

- GPTQ: AutoGPTQ ``nn_modules/qlinear/qlinear_cuda.py`` ``pack``; version 2 stores zero points as they are.
- AWQ: AutoAWQ ``modules/linear/gemm.py`` ``from_linear``, with ``order_map = [0, 2, 4, 6, 1, 3, 5, 7]``.
- FP8 and INT8 of compressed-tensors, ModelOpt, FBGEMM and transformers: number times scale; ``weight_scale_inv`` too.
- compressed-tensors: ``compressors/pack_quantized/helpers.py`` ``pack_to_int32``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdecode_worker.models.arch import causal_lm_config, new_network
from specdecode_worker.models.linear import Linear

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
Draw = Callable[[int, int, int], tuple[dict[str, Tensor], Tensor]]
"""Function from N, K and a seed to the tensors of a matrix, by the ends of their names, and its weight in fp32."""


def int4_numbers(
    rows: int, columns: int, seed: int, *, group: int, symmetric: bool, ordered: bool = False, dtype: torch.dtype
) -> Numbers:
    """Return random numbers. With ``ordered``, columns of a group are anywhere (act-order)."""
    generator = torch.Generator().manual_seed(seed)
    group = min(group, columns)
    groups = columns // group

    def integers(low: int, *shape: int) -> Tensor:
        return torch.randint(low, 16, shape, generator=generator)

    # an odd seed has larger scales, so that q, k and v differ
    scale = (0.01 + 0.02 * torch.rand(rows, groups, generator=generator)) * (1 + seed % 3)
    groups_K = torch.arange(columns) // group
    if ordered:
        # matrices that read the same input share the order, which is that of its activations
        groups_K = groups_K[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    zero = torch.full((rows, groups), 8) if symmetric else integers(1, rows, groups)
    return Numbers(integers(0, rows, columns), scale.to(dtype), zero, groups_K)


def words(integers: Tensor, places: Sequence[int] = range(8), bits: int = 4) -> Tensor:
    """Pack unsigned integers along the last dimension; entry i of a word takes the bits at ``places[i]``."""
    count = 32 // bits
    parts = integers.long().reshape(*integers.shape[:-1], -1, count)
    packed = sum(parts[..., i] << bits * places[i] for i in range(count))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def gptq(numbers: Numbers, *, version: int = 1) -> dict[str, Tensor]:
    """Return GPTQ's tensors."""
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
    """Return the tensors of compressed-tensors' pack-quantized."""
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
) -> Draw:
    """Return the drawing of int4 matrices that ``packer`` packs."""

    def draw(rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        numbers = int4_numbers(rows, columns, seed, group=group, symmetric=symmetric, ordered=ordered, dtype=dtype)
        return packer(numbers), numbers.weight

    return draw


def scaled(
    scales: str, *, dtype: torch.dtype = torch.float32, name: str = "weight_scale", integers: bool = False
) -> Draw:
    """Return the drawing of fp8, or int8, matrices with a scale of all, of each row, or of each block of 128 by 128."""

    def draw(rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = {"scalar": (), "tensor": (1,), "rows": (rows, 1), "blocks": (-(-rows // 128), -(-columns // 128))}[
            scales
        ]
        scale = ((0.001 + 0.002 * torch.rand(shape, generator=generator)) * (1 + seed % 3)).to(dtype)
        levels = 60 * torch.randn(rows, columns, generator=generator)
        levels = levels.clamp(-127, 127).round().to(torch.int8) if integers else levels.to(torch.float8_e4m3fn)
        wide = scale.float()
        if scales == "blocks":
            wide = wide[torch.arange(rows)[:, None] // 128, torch.arange(columns)[None, :] // 128]
        return {"weight": levels, name: scale}, levels.float() * wide

    return draw


def nvfp4(*, modelopt: bool = False) -> Draw:
    """Return the drawing of NVFP4 matrices, as compressed-tensors or ModelOpt name and scale them.

    After compressed-tensors ``compressors/nvfp4/helpers.py``, ``pack_fp4_to_uint8``: index of the magnitude in a table,
    bit 3 for the sign, the first of two in the low bits.
    """
    table = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def draw(rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 16, (rows, columns), generator=generator)
        levels = torch.tensor([*table, *(-one for one in table)])[codes]
        scale = (100 + 300 * torch.rand(rows, columns // 16, generator=generator)).to(torch.float8_e4m3fn)
        whole = torch.tensor([9000.0 / (1 + seed % 3)])
        packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        if modelopt:
            wide, named = scale.float() * (1 / whole), {"weight": packed, "weight_scale_2": (1 / whole).reshape(())}
        else:
            wide, named = scale.float() / whole, {"weight_packed": packed, "weight_global_scale": whole}
        return named | {"weight_scale": scale}, levels * wide.repeat_interleave(16, 1)

    return draw


def write_quantized(
    folder: Path,
    draw: Draw,
    quantization: dict[str, Any],
    *,
    plain: tuple[str, ...] = (),
    rename: Callable[[str], str] = str,
    **changed: Any,
) -> dict[str, Tensor]:
    """Write a target whose blocks have quantized matrices, and return the weights of the network in fp32.

    ``plain`` names matrices that stay plain, by the last part of their names. ``rename`` returns names in the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPE | changed
    model = new_network(causal_lm_config(config))
    generator = torch.Generator().manual_seed(11)
    weights = {
        name: 0.1 * torch.randn(tensor.shape, generator=generator) + (1.0 if tensor.dim() == 1 else 0.0)
        for name, tensor in model.state_dict().items()
    }
    stored = dict(weights)
    matrices = [(name, one) for name, one in model.model.layers.named_modules() if isinstance(one, Linear)]
    for seed, (name, linear) in enumerate(matrices):
        name = f"model.layers.{name}"
        if name.rpartition(".")[2] not in plain:
            tensors, weights[f"{name}.weight"] = draw(linear.out_features, linear.in_features, seed)
            del stored[f"{name}.weight"]
            stored |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}
    if config.get("tie_word_embeddings"):
        del stored["lm_head.weight"]
    save_file({rename(name): tensor for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return weights


def write_sparse(folder: Path, form: str, **shape: Any) -> None:
    """Write a target of real size without its numbers: a header, and a file without blocks on the disk.

    ``form`` is fp8 (scales of rows) or awq (groups of 128), for the matrices of all blocks.
    """
    folder.mkdir(parents=True)
    config = SHAPE | {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128} | shape
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * 128, config["num_key_value_heads"] * 128
    matrices = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
    }
    matrices |= {"self_attn.o_proj": (width, queries), "mlp.down_proj": (width, inner)}
    matrices |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    tensors: dict[str, tuple[str, list[int]]] = {"model.norm.weight": ("BF16", [width])}
    tensors |= {f"{name}.weight": ("BF16", [config["vocab_size"], width]) for name in ("model.embed_tokens", "lm_head")}
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ("BF16", [width])
        for name, (rows, columns) in matrices.items():
            held: dict[str, tuple[str, list[int]]] = {"weight": ("F8_E4M3", [rows, columns])}
            held["weight_scale"] = ("BF16", [rows, 1])
            if form == "awq":
                groups = columns // 128
                held = {"qweight": ("I32", [columns, rows // 8]), "qzeros": ("I32", [groups, rows // 8])}
                held["scales"] = ("F16", [groups, rows])
            tensors |= {f"model.layers.{layer}.{name}.{suffix}": header for suffix, header in held.items()}
    at, header = 0, {}
    for name, (dtype, sizes) in tensors.items():
        end = at + math.prod(sizes) * {"F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [at, end]}
        at = end
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + at)
    (folder / "config.json").write_text(json.dumps(config))
