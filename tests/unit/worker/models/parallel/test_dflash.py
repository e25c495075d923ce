"""Tests of DFlash heads: z-lab's layout, refusals by name, and their logits against a plain computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import dflash_config
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.weights import load_head, prepare_dflash
from support.worker.checkpoints import CPU, DFLASH, Tensors, dflash_tensors, noise, norm, write

MASK, BLOCK, COMMITTED = 95, 6, 7


def flat(shape: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return config.json as z-lab writes it."""
    own = {"num_hidden_layers": 2, "num_target_layers": shape["num_hidden_layers"]}
    return shape | DFLASH | own | {"layer_types": ["full_attention"] * 2} | change


def load(folder: Path, target: CausalLM) -> DFlashHead:
    return load_head(prepare_dflash(folder, target), target, dtype=torch.float32, device=CPU)


def rotated(x_THD: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate halves of the head dimension by Llama's frequencies."""
    half = x_THD.shape[-1] // 2
    angle = positions_T[:, None].float() * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = (f(torch.cat((angle, angle), -1))[:, None] for f in (torch.cos, torch.sin))
    return x_THD * cos + torch.cat((-x_THD[..., half:], x_THD[..., :half]), -1) * sin


def plain_logits(tensors: Tensors, target: CausalLM, aux: Tensor, tokens: Tensor) -> Tensor:
    """Compute the logits of the mask slots of one block from the definition."""
    heads = 4
    committed = torch.arange(len(aux))
    block = len(aux) + torch.arange(len(tokens))
    context = norm(aux @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    x = target.model.embed_tokens(tokens)
    for i in range(2):

        def weight(name: str, i: int = i) -> Tensor:
            return tensors[f"layers.{i}.{name}.weight"]

        def split(y: Tensor, name: str) -> Tensor:
            return (y @ weight(f"self_attn.{name}_proj").T).unflatten(-1, (-1, 32 // heads))

        y = norm(x, weight("input_layernorm"))
        q = rotated(norm(split(y, "q"), weight("self_attn.q_norm")), block)
        k = torch.cat([rotated(norm(split(z, "k"), weight("self_attn.k_norm")), at)
                       for z, at in ((context, committed), (y, block))])  # fmt: skip
        v = torch.cat((split(context, "v"), split(y, "v")))
        k, v = (z.repeat_interleave(heads // z.shape[1], dim=1) for z in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / (32 // heads) ** 0.5
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + out @ weight("self_attn.o_proj").T
        y = norm(x, weight("post_attention_layernorm"))
        gated = F.silu(y @ weight("mlp.gate_proj").T) * (y @ weight("mlp.up_proj").T)
        x = x + gated @ weight("mlp.down_proj").T
    return target.logits(norm(x[1:], tensors["norm.weight"]))


@torch.inference_mode()
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_head_equals_a_plain_computation(fused: bool, target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    tensors = dflash_tensors()
    head = load(write(tmp_path, flat(shape), tensors), target)
    aux = noise(COMMITTED, 64, seed=5)
    tokens = torch.tensor([3, *[MASK] * (BLOCK - 1)])
    wanted = plain_logits(tensors, target, aux, tokens)
    if fused:
        fuse(head)
    context = head.context(aux, torch.arange(COMMITTED))

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        k, v = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context[layer], (k_TKD, v_TKD), strict=True))
        return F.scaled_dot_product_attention(q_THD.transpose(0, 1)[None], k, v, enable_gqa=True)[0].transpose(0, 1)

    states = head(tokens, COMMITTED + torch.arange(BLOCK), attend)
    torch.testing.assert_close(head.logits(states[1:]), wanted, atol=1e-5, rtol=1e-5)


def test_layer_ids_name_outputs_of_layers(target: CausalLM, shape: dict[str, Any]) -> None:
    config = dflash_config(flat(shape), target.config)
    assert config.aux_layers == (1, 3)
    assert (config.mask_token_id, config.block_size, config.qk_norm) == (MASK, BLOCK, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id must be"),
        ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0]}}, "mask_token_id must be"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, "do not name layers of the target"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [99]}}, "do not name layers of the target"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "use_swa": True}}, "use_swa True"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "causal": True}}, "causal True"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types \['sliding_attention'\] are not supported"),
        ({"block_size": 1}, r"block_size must be an integer in 2\.\.64, got 1"),
        ({"is_causal": True}, "is_causal True is not supported"),
        ({"num_target_layers": 99}, "num_hidden_layers 99, this target has"),
        ({"hidden_size": 64}, "hidden_size 64, this target has 32"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale 2.0 is not supported"),
        ({"speculators_model_type": "dspark"}, "'dspark' is no dflash head"),
    ],
    ids=str,
)
def test_wrong_config_is_refused(change: dict[str, Any], message: str, target: CausalLM, shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        dflash_config(flat(shape, **change), target.config)
