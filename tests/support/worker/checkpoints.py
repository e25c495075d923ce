"""Hand-made checkpoints of draft heads, and transformers' decoder layer as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig as Config

# Takes six seconds, which no test's time may contain.
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specdecode_worker.contract import Method
from specdecode_worker.models.config import CausalLMConfig
from specdecode_worker.models.drafts import WeightMethod, build_meta_draft
from specdecode_worker.models.weights import prepare_causal_lm

CPU = torch.device("cpu")
SLOTS = torch.arange(1, 14)
TOKENS = torch.randint(0, 97, (13,), generator=torch.Generator().manual_seed(4))
Tensors = dict[str, Tensor]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return reproducible random weights; a vector is a norm's weight near one."""
    scale = 0.2 if len(shape) > 1 else 0.1
    weight = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return weight if len(shape) > 1 else 1 + weight


def block_tensors(
    prefix: str, *, inputs: int = 32, size: int = 32, seed: int = 0, norms: tuple[str, ...] = ()
) -> Tensors:
    """Return the tensors of a small decoder layer under their checkpoint names."""
    matrices = {"q_proj": (size, inputs), "k_proj": (size // 2, inputs), "v_proj": (size // 2, inputs)}
    tensors = {f"self_attn.{name}": noise(*shape, seed=seed + i) for i, (name, shape) in enumerate(matrices.items())}
    tensors["self_attn.o_proj"] = noise(size, size, seed=seed + 3)
    tensors |= {f"mlp.{name}": noise(48, size, seed=seed + i) for i, name in enumerate(("gate_proj", "up_proj"), 4)}
    tensors["mlp.down_proj"] = noise(size, 48, seed=seed + 6)
    tensors |= {name: noise(size, seed=seed + i) for i, name in enumerate((*norms, "post_attention_layernorm"), 7)}
    return {f"{prefix}{name}.weight": tensor for name, tensor in tensors.items()}


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def reference(config: CausalLMConfig, size: int = 32) -> tuple[Callable[[Tensor, Tensors, str], Tensor], Any]:
    """Return a reference decoder layer over SLOTS and its rotary tables, both from transformers.

    The layer is called with its input, the tensors and the prefix of their names.
    """
    theirs = Config(
        hidden_size=size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    tables = LlamaRotaryEmbedding(theirs)(torch.ones(1), SLOTS[None])
    mask = torch.full((13, 13), -torch.inf).triu(1)[None, None]

    def layer(x_TE: Tensor, tensors: Tensors, prefix: str) -> Tensor:
        block = LlamaDecoderLayer(theirs, 0)
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if "input_layernorm.weight" not in own:
            block.input_layernorm = torch.nn.Identity()
        block.load_state_dict(own)
        output: Tensor = block(x_TE[None], attention_mask=mask, position_embeddings=tables)[0]
        return output

    return layer, tables


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def first_layer(
    tensors: dict[str, Tensor], embedding: Tensor, hidden: Tensor, residual: Tensor, tables: Any, dense: Any
) -> Tensor:
    """Compute SafeAILab's midlayer directly from its definition."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def weight(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    pair = torch.cat((norm(embedding, weight("input_layernorm")), norm(hidden, weight("hidden_norm"))), -1)
    q, k, v = ((pair @ weight(f"self_attn.{n}_proj").T).unflatten(-1, (-1, embedding.shape[1] // 4)) for n in "qkv")
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *tables)
    out = dense(0, q[0].transpose(0, 1), k[0].transpose(0, 1), v)
    x = residual + out.flatten(1) @ weight("self_attn.o_proj").T
    y = norm(x, weight("post_attention_layernorm"))
    gated = F.silu(y @ weight("mlp.gate_proj").T) * (y @ weight("mlp.up_proj").T)
    return x + gated @ weight("mlp.down_proj").T


def eagle_tensors(layers: int = 1, *, bias: bool = True) -> Tensors:
    tensors = block_tensors("layers.0.")
    for i in range(1, layers):
        tensors |= block_tensors(f"layers.{i}.", seed=20 * i, norms=("input_layernorm",))
    tensors["fc.weight"] = noise(32, 64)
    return tensors | ({"fc.bias": noise(32)} if bias else {})


def eagle3_tensors(layers: int = 1, *, size: int = 32, states: int = 3) -> Tensors:
    tensors = block_tensors("midlayer.", inputs=2 * size, size=size, norms=("hidden_norm", "input_layernorm"))
    for i in range(1, layers):
        tensors |= block_tensors(f"layers.{i}.", size=size, seed=20 * i, norms=("input_layernorm",))
    tensors |= {"norm.weight": noise(size, seed=3), "lm_head.weight": noise(40, size), "d2t": torch.arange(40)}
    return tensors | ({"fc.weight": noise(size, 32 * states)} if states else {})


DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 6,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]},
}
"""Fields of config.json that only DFlash heads have, as z-lab writes them."""


def dflash_tensors(layers: int = 2) -> Tensors:
    """Return the tensors of a DFlash head that reads two layers, under z-lab's names."""
    tensors = {"fc.weight": noise(32, 64), "hidden_norm.weight": noise(32, seed=1), "norm.weight": noise(32, seed=2)}
    for i in range(layers):
        prefix = f"layers.{i}."
        tensors |= block_tensors(prefix, seed=20 * i, norms=("input_layernorm",))
        tensors |= {f"{prefix}self_attn.{name}.weight": noise(8, seed=5 + i) for name in ("q_norm", "k_norm")}
    return tensors


def speculators_dflash(shape: dict[str, Any], *, draft_vocab: int = 97, **change: Any) -> dict[str, Any]:
    """Return config.json of the head of `dflash_tensors` as speculators writes it."""
    layers = {name: value for name, value in shape.items() if name != "architectures"}
    layers |= {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers | {"use_sliding_window": False, "sliding_window": None},
        "draft_vocab_size": draft_vocab,
        "block_size": 6,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 95,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    } | change


def medusa_tensors(heads: int, layers: int, *, bias: bool = True, rows: int = 97) -> Tensors:
    tensors: Tensors = {}
    for h in range(heads):
        for i in range(layers):
            tensors[f"{h}.{i}.linear.weight"] = noise(32, 32, seed=10 * h + i)
            tensors |= {f"{h}.{i}.linear.bias": noise(32, seed=10 * h + i)} if bias else {}
        tensors[f"{h}.{layers}.weight"] = noise(rows, 32, seed=h)
    return tensors


def write_heads(folder: Path, shape: dict[str, Any]) -> dict[WeightMethod, Path]:
    """Write a head of each method for a target of this config.json, and return their folders."""
    config = shape | {"num_hidden_layers": 1}
    eagle3, dflash = config | {"draft_vocab_size": 40}, {"mask_token_id": 9, "target_layer_ids": [0, 1]}
    heads: dict[WeightMethod, tuple[dict[str, Any], Tensors]] = {
        "eagle3": (eagle3, eagle3_tensors()),
        "peagle": (eagle3 | {"mask_token_id": 9}, eagle3_tensors() | {"mask_hidden": torch.ones(1, 1, 96)}),
        "dflash": (config | DFLASH | {"dflash_config": dflash}, dflash_tensors(1)),
        "eagle": (config, eagle_tensors()),
        "medusa": ({"medusa_num_heads": 2}, medusa_tensors(2, 1)),
    }
    return {method: write(folder / method, *head) for method, head in heads.items()}


def check_draft(method: Method, folder: Path, target_folder: Path, *, max_model_len: int | None = None) -> None:
    """Check a draft as `specdecode-worker check` does, without reading weights."""
    target = prepare_causal_lm(target_folder, max_model_len=max_model_len).network
    build_meta_draft(method, folder, target, target_folder=target_folder, max_model_len=max_model_len)
