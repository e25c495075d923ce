"""LoRA adapter of a target (Hu et al., arXiv 2106.09685), merged into its weights while they are read.

The format is PEFT's: adapter_config.json, and adapter_model.safetensors with tensors ``A`` [R, K] and ``B`` [N, R] of a
matrix [N, K] (huggingface/peft 0.21.2: src/peft/utils/save_and_load.py for the names, ``get_delta_weight`` and
``update_layer`` of src/peft/tuners/lora/layer.py for the sum, ``get_pattern_key`` of src/peft/utils/other.py for the
patterns). The sum is computed in fp32 and rounded once, to the dtype that the target is served in. The merged target is
one like any other: it costs nothing at run time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdecode_worker.models.checkpoint import FLOATS, Checkpoint, Update
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.fetch import ADAPTER_FOLDER
from specdecode_worker.models.fields import Fields, read_config

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.weight)?")
_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""Fields that are read here, or that leave the sum of base and product as it is. peft ignores ``fan_in_fan_out`` where
the target's matrix is a torch.nn.Linear, as all of ours are. The tensors say which matrices are adapted."""
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that leave the base as it is. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change it."""
_REMEDY = "merge it with peft (merge_and_unload, save_pretrained) and serve the result as model.uri"


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """Product that is added to a matrix [N, K], of rank R."""

    up_NR: Tensor
    down_RK: Tensor
    scale: float

    def __call__(self, weight: Tensor, part: tuple[slice, ...]) -> Tensor:
        """Return the sum with that part of a matrix, in fp32 or what is wider."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        rows, columns = part
        return weight.to(dtype) + self.up_NR[rows].to(dtype) @ self.down_RK[:, columns].to(dtype) * self.scale


def adapted(checkpoint: Checkpoint, rename: Callable[[str], str | None], *, tied: bool) -> Checkpoint:
    """Return the checkpoint with the adapter that its folder holds, or as it is where there is none.

    Args:
        checkpoint: Tensors of a target.
        rename: Function that maps names in the files to names in the network.
        tied: Whether embeddings and lm_head are one matrix.

    Raises:
        ConfigMismatch: The adapter is of a kind that cannot be merged.
        WeightMismatch: A tensor of the adapter does not fit the target.
    """
    folder = checkpoint.folder / ADAPTER_FOLDER
    if not folder.is_dir():
        return checkpoint
    adapter = Fields(read_config(folder, _CONFIG), str(folder / _CONFIG))
    _refuse_other_kinds(adapter)
    if read_config(checkpoint.folder).get("quantization_config"):
        raise ConfigMismatch(f"{folder}: the target is stored quantized; name the target that the adapter was trained "
                             "for before its quantization, with engine.quantization")  # fmt: skip
    updates: dict[str, Update] = {}
    for module, (down_RK, up_NR) in _pairs(folder).items():
        name = rename(f"{module}.weight")
        if tied and name in ("model.embed_tokens.weight", "lm_head.weight"):
            raise WeightMismatch(f"{folder}: {module} is tied to another matrix and cannot be adapted; {_REMEDY}")
        if name is None or name not in checkpoint:
            raise WeightMismatch(f"{folder}: the target has no {module}; name the target of the adapter's training")
        rank = _patterned(adapter, "rank_pattern", module, "r", 8)
        alpha = _patterned(adapter, "alpha_pattern", module, "lora_alpha", 8)
        header, shape = checkpoint.tensors[name], (up_NR.shape[0], down_RK.shape[1])
        if header.shape != shape or header.dtype not in FLOATS:
            found = f"{list(header.shape)} of {header.dtype}"
            raise WeightMismatch(f"{folder}: {module} adapts a matrix {list(shape)}, the target's is {found}; "
                                 "name the target of the adapter's training")  # fmt: skip
        if (up_NR.shape[1], down_RK.shape[0]) != (rank, rank):
            raise WeightMismatch(f"{folder}: {module} has rank {down_RK.shape[0]}, {_CONFIG} says {rank:g}; save again")
        scale = alpha / (math.sqrt(rank) if adapter.flag("use_rslora") else rank)
        updates[name] = LowRankUpdate(up_NR, down_RK, scale)
    if not updates:
        raise WeightMismatch(f"{folder / _WEIGHTS} holds no tensors; save the adapter again")
    return replace(checkpoint, updates=updates)


def _refuse_other_kinds(adapter: Fields) -> None:
    """Raise ConfigMismatch for an adapter that is more than a sum of base and product."""
    kind = adapter.text("peft_type", "LORA")
    found = [f"peft_type {kind}"] if kind != "LORA" else []
    if adapter.text("bias", "none") != "none":
        found.append("bias")
    if adapter.raw.get("init_lora_weights") not in _STARTS:
        found.append(f"init_lora_weights {adapter.raw['init_lora_weights']}")
    found += sorted(name for name, value in adapter.raw.items() if value and name not in {*_HARMLESS, "bias"})
    if found:
        raise ConfigMismatch(f"{adapter.where}: {found[0]} is not supported; {_REMEDY}")


def _pairs(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [R, K] and B [N, R] of each module of the target, by its name."""
    sides: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safe_open is no dict
                match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
                tensor = file.get_tensor(name)
                if match is None or tensor.dim() != 2:
                    raise WeightMismatch(f"{folder / _WEIGHTS}: {name} is no matrix A or B of LoRA; {_REMEDY}")
                # Of an embedding [V, E], A is [R, V] and B is [E, R]: the product is transposed.
                side = match["side"] if not match["kind"] else "BA"["AB".index(match["side"])]
                sides.setdefault(match["module"], {})[side] = tensor.t() if match["kind"] else tensor
    except (SafetensorError, OSError) as error:
        raise WeightMismatch(
            f"{folder / _WEIGHTS} cannot be read: {error}; save the adapter with safe_serialization=True"
        ) from None
    if incomplete := sorted(module for module, pair in sides.items() if len(pair) < 2):
        raise WeightMismatch(f"{folder / _WEIGHTS}: {incomplete[0]} has only one of lora_A and lora_B; save it again")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _patterned(adapter: Fields, patterns: str, module: str, default: str, otherwise: int) -> float:
    """Return rank or alpha of a module: that of the first pattern that its name ends with, else that of all."""
    values = adapter.part(patterns)
    for pattern in values.raw:
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return values.number(pattern)
        except re.error as error:
            raise ConfigMismatch(f"{values.where}: {pattern} is no regular expression: {error}") from None
    return adapter.number(default, otherwise)
