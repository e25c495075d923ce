"""Tests of P-EAGLE heads: their formats, refusals by name, and their logits against a plain computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import peagle_config
from specdecode_worker.models.eagle import PEagleHead
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.weights import load_head, prepare_peagle
from support.worker.checkpoints import (
    CPU,
    SLOTS,
    TOKENS,
    Tensors,
    eagle3_tensors,
    first_layer,
    noise,
    norm,
    reference,
    write,
)
from support.worker.dense_attention import dense

MASK = 95
MASKED = torch.arange(13) >= 10
"""The last three slots of the pass are mask slots."""


def peagle_tensors(layers: int = 2) -> Tensors:
    """Return the tensors of a P-EAGLE head as speculators stores them, with the state of its mask slots."""
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3_tensors(layers).items()}
    return named | {"mask_hidden": noise(1, 1, 96, seed=8)}


def flat(shape: dict[str, Any], **change: Any) -> dict[str, Any]:
    return shape | {"num_hidden_layers": 2, "draft_vocab_size": 40, "mask_token_id": MASK} | change


def load(folder: Path, target: CausalLM) -> PEagleHead:
    return load_head(prepare_peagle(folder, target), target, dtype=torch.float32, device=CPU)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_head_equals_a_plain_computation(
    fused: bool, norm_before_residual: bool, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = peagle_tensors()
    head = load(write(tmp_path, flat(shape, norm_before_residual=norm_before_residual), tensors), target)
    if fused:
        fuse(head)
    aux = noise(13, 96, seed=5)
    read = torch.cat((aux[:10], tensors["mask_hidden"].view(1, 96).expand(3, 96)))
    text = torch.cat((TOKENS[:10], torch.full((3,), MASK)))
    hidden = read @ tensors["fc.weight"].T
    layer, tables = reference(target.config)
    theirs = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    residual = norm(hidden, tensors["layers.0.hidden_norm.weight"]) if norm_before_residual else hidden
    x = layer(
        first_layer(theirs, target.model.embed_tokens(text), hidden, residual, tables, dense), tensors, "layers.1."
    )
    wanted = norm(x, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    states = head(head.masked_states(aux, MASKED), text, SLOTS, dense)
    torch.testing.assert_close(head.logits(states), wanted, atol=1e-5, rtol=1e-5)


def test_nested_config_of_speculators_is_read(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    layer = {name: shape[name] for name in shape if name != "architectures"} | {"head_dim": 8, "num_hidden_layers": 2}
    nested = {
        "architectures": ["PEagleSpeculator"],
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
        "embed_requires_grad": True,
        "mask_token_id": MASK,
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [{"proposal_type": "greedy"}]},
        "speculators_model_type": "peagle",
        "transformer_layer_config": layer,
    }
    config = flat(shape, eagle_aux_hidden_state_layer_ids=[0, 2, 4])
    assert peagle_config(nested, target.config) == peagle_config(config, target.config)
    own = peagle_tensors() | {"embed_tokens.weight": noise(97, 32)}
    head = load(write(tmp_path, nested, own), target)
    torch.testing.assert_close(head.embed_tokens.weight, own["embed_tokens.weight"])


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_mask_token_has_three_names(name: str, target: CausalLM, shape: dict[str, Any]) -> None:
    config = flat(shape, mask_token_id=None) | {name: 7}
    assert peagle_config(config, target.config).mask_token_id == 7


@pytest.mark.parametrize("stored", [(96,), (1, 96), (1, 1, 96)], ids=str)
def test_mask_state_may_be_stored_flat(
    stored: tuple[int, ...], target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = peagle_tensors()
    head = load(write(tmp_path, flat(shape), tensors | {"mask_hidden": tensors["mask_hidden"].view(stored)}), target)
    aux = noise(13, 96, seed=5)
    wanted = torch.where(MASKED[:, None], tensors["mask_hidden"].flatten(), aux) @ tensors["fc.weight"].T
    torch.testing.assert_close(head.masked_states(aux, MASKED), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "needs one of mask_token_id, pard_token, ptd_token_id"),
        ({"mask_token_id": 97}, r"mask_token_id must be an integer in 0\.\.96, got 97"),
        ({"pard_token": 3}, "mask_token_id and pard_token name different tokens"),
        ({"parallel_drafting": False}, "parallel_drafting false is no P-EAGLE head"),
        ({"speculators_model_type": "eagle3"}, "'eagle3' is no peagle head"),
        ({"target_hidden_size": 64}, "hidden_size 64, this target has 32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_config_is_refused(change: dict[str, Any], message: str, target: CausalLM, shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        peagle_config(flat(shape, **change), target.config)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mask_hidden", torch.zeros(1, 1, 95), r"mask_hidden has shape \[1, 1, 95\]"),
        ("mask_hidden", torch.full((1, 1, 96), torch.nan), "mask_hidden holds NaN"),
        ("mask_hidden", torch.zeros(1, 1, 96, dtype=torch.int64), "mask_hidden has dtype I64"),
        ("layers.1.mlp.up_proj.weight", None, r"layers\.1\.mlp\.up_proj\.weight is missing"),
        ("layers.2.mlp.up_proj.weight", torch.zeros(48, 32), r"layers\.2\.mlp\.up_proj\.weight is not part"),
        ("d2t", torch.full((40,), 97), "d2t maps outside"),
    ],
    ids=["shape", "nan", "dtype", "missing", "extra", "map"],
)
def test_wrong_tensor_is_refused_by_name(
    name: str, tensor: torch.Tensor | None, message: str, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = peagle_tensors()
    tensors.pop(name, None)
    folder = write(tmp_path, flat(shape), tensors | ({} if tensor is None else {name: tensor}))
    with pytest.raises(WeightMismatch, match=message):
        load(folder, target)
