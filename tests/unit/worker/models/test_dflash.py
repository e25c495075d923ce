"""Tests of DFlash heads: the layouts of z-lab and speculators, refusals by name, and logits of a plain computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import dflash_config
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.linear import QuantizedWeight
from specdecode_worker.models.optimize import fuse, quantise_draft
from specdecode_worker.training.errors import DraftNotTrainable
from specdecode_worker.training.heads import prepare_draft
from support.worker.checkpoints import (
    DFLASH,
    Tensors,
    check_draft,
    dflash_tensors,
    noise,
    norm,
    speculators_dflash,
    write,
)
from support.worker.dense_attention import block_states
from support.worker.small_folders import loaded_head

MASK, BLOCK, COMMITTED = 95, 6, 7
AUX = noise(COMMITTED, 64, seed=5)
TOKENS = torch.tensor([3, *[MASK] * (BLOCK - 1)])
"""Tokens of one block."""
KNOWN = torch.arange(0, 97, 3)
"""Target ids of the draft's vocabulary, where it has one of its own."""


def flat(shape: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return config.json as z-lab writes it."""
    own = {"num_hidden_layers": 2, "num_target_layers": shape["num_hidden_layers"]}
    return shape | DFLASH | own | {"layer_types": ["full_attention"] * 2} | change


@torch.inference_mode()
def block_logits(head: DFlashHead) -> Tensor:
    """Return the logits of the mask slots of one block behind a few committed tokens."""
    return head.logits(block_states(head, AUX, TOKENS)[1:])


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
    head = loaded_head("dflash", write(tmp_path, flat(shape), tensors), target)
    wanted = plain_logits(tensors, target, AUX, TOKENS)
    if fused:
        fuse(head)
    torch.testing.assert_close(block_logits(head), wanted, atol=1e-5, rtol=1e-5)


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


def copies(target: CausalLM, known: Tensor | None = None) -> Tensors:
    """Return the tensors that speculators adds: copies of the target's, and the map of a draft vocabulary."""
    tensors = {"embed_tokens.weight": target.model.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}
    if known is None:
        return tensors
    mapped = torch.zeros(97, dtype=torch.bool)
    mapped[known] = True
    own = {"lm_head.weight": target.lm_head.weight[known], "d2t": known - torch.arange(len(known)), "t2d": mapped}
    return tensors | own


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("prefix", ["", "model."], ids=["", "prefixed"])
def test_logits_equal_those_of_zlabs_layout(
    prefix: str, fused: bool, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    plain = loaded_head("dflash", write(tmp_path / "flat", flat(shape), dflash_tensors()), target)
    tensors = {prefix + name: tensor for name, tensor in (dflash_tensors() | copies(target)).items()}
    head = loaded_head("dflash", write(tmp_path / "head", speculators_dflash(shape), tensors), target)
    assert head.config == plain.config
    if fused:
        fuse(head)
        fuse(plain)
    assert head.target_ids is None
    torch.testing.assert_close(block_logits(head), block_logits(plain))


def test_a_draft_vocabulary_is_a_part_of_the_targets(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    plain = loaded_head("dflash", write(tmp_path / "flat", flat(shape), dflash_tensors()), target)
    config = speculators_dflash(shape, draft_vocab=len(KNOWN))
    folder = write(tmp_path / "head", config, dflash_tensors() | copies(target, KNOWN))
    check_draft("dflash", folder, write(tmp_path / "target", shape, target.state_dict()))
    head = loaded_head("dflash", folder, target)
    assert head.target_ids.tolist() == KNOWN.tolist()
    torch.testing.assert_close(block_logits(head), block_logits(plain)[:, KNOWN])


def test_copies_are_used_where_they_differ_from_the_target(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    own = {"embed_tokens.weight": noise(97, 32, seed=8), "lm_head.weight": noise(97, 32, seed=9)}
    head = loaded_head("dflash", write(tmp_path / "head", speculators_dflash(shape), dflash_tensors() | own), target)
    got = block_logits(head)
    target.model.embed_tokens.weight.data.copy_(own["embed_tokens.weight"])
    target.lm_head.weight.data.copy_(own["lm_head.weight"])
    plain = loaded_head("dflash", write(tmp_path / "flat", flat(shape), dflash_tensors()), target)
    torch.testing.assert_close(got, block_logits(plain))


def test_own_output_matrix_is_quantised(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    head = loaded_head("dflash", write(tmp_path, speculators_dflash(shape), dflash_tensors() | copies(target)), target)
    wanted = block_logits(head)
    quantise_draft(head, "int8", stored=True)
    assert isinstance(head.lm_head.stored, QuantizedWeight)
    torch.testing.assert_close(block_logits(head), wanted, atol=0.1, rtol=0.1)


def test_a_head_with_copies_is_not_trained_further(shape: dict[str, Any], tmp_path: Path) -> None:
    target = CausalLM(causal_lm_config(shape | {"num_hidden_layers": 7})).requires_grad_(False)
    config = speculators_dflash(shape, aux_hidden_state_layer_ids=[2, 3, 4])
    tensors = dflash_tensors() | {"fc.weight": noise(32, 96)}
    bare = loaded_head("dflash", write(tmp_path / "bare", config, tensors), target)
    assert prepare_draft(bare, target, torch.arange(97)) is bare
    head = loaded_head("dflash", write(tmp_path / "head", config, tensors | copies(target)), target)
    with pytest.raises(DraftNotTrainable, match="layout of speculators"):
        prepare_draft(head, target, torch.arange(97))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported"),
        ({"aux_hidden_state_layer_ids": None}, r"aux_hidden_state_layer_ids \[\] do not name layers of the target"),
        ({"aux_hidden_state_layer_ids": [1, 6]}, r"aux_hidden_state_layer_ids \[1, 6\] do not name layers"),
        ({"mask_token_id": None}, "mask_token_id must be"),
        ({"target_hidden_size": 64}, "hidden_size 64, this target has 32"),
        ({"draft_vocab_size": 98}, "draft_vocab_size must be an integer in 1..97"),
        ({"draft_vocab_size": None}, "draft_vocab_size must be"),
        ({"speculators_model_type": "eagle3"}, "'eagle3' is no dflash head"),
    ],
    ids=str,
)
def test_wrong_config_of_speculators_is_refused(
    change: dict[str, Any], message: str, target: CausalLM, shape: dict[str, Any]
) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        dflash_config(speculators_dflash(shape, **change), target.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": torch.zeros(97, 32)}, r"lm_head\.weight has shape \[97, 32\], config.json asks for \[33,"),
        ({"lm_head.weight": None}, r"lm_head\.weight is missing"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": torch.full((33,), 90)}, "d2t maps outside the target's vocabulary of 97"),
        ({"embed_tokens.weight": torch.zeros(33, 32)}, r"embed_tokens\.weight has shape \[33, 32\]"),
        ({"verifier_norm.weight": torch.ones(32)}, r"verifier_norm\.weight is not part"),
    ],
    ids=["lm_head shape", "no lm_head", "no d2t", "d2t range", "embedding shape", "verifier"],
)
def test_wrong_tensor_is_refused_by_name(
    change: dict[str, Tensor | None], message: str, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors: dict[str, Tensor | None] = {**dflash_tensors(), **copies(target, KNOWN), **change}
    config = speculators_dflash(shape, draft_vocab=len(KNOWN))
    folder = write(tmp_path, config, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(WeightMismatch, match=message):
        loaded_head("dflash", folder, target)


def test_a_map_is_refused_where_the_vocabulary_is_the_targets(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = dflash_tensors() | copies(target) | {"d2t": torch.zeros(97, dtype=torch.int64)}
    with pytest.raises(WeightMismatch, match="d2t is not part of this model"):
        loaded_head("dflash", write(tmp_path, speculators_dflash(shape), tensors), target)
