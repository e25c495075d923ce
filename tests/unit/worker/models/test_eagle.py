"""Tests of EAGLE-1 and EAGLE-2 heads against SafeAILab's cnets1.py, rebuilt with transformers' layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import EagleHead
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import load_head, prepare_eagle
from support.worker.checkpoints import CPU, SLOTS, TOKENS, eagle_tensors, noise, reference, write
from support.worker.dense_attention import dense


def eagle_shape(shape: dict[str, Any], layers: int = 1) -> dict[str, Any]:
    return shape | {"num_hidden_layers": layers, "max_position_embeddings": 4}


def load(folder: Path, target: CausalLM) -> EagleHead:
    return load_head(prepare_eagle(folder, target), target, dtype=torch.float32, device=CPU)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_eagle_head_equals_cnets1(
    layers: int, bias: bool, fused: bool, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = eagle_tensors(layers, bias=bias)
    head = load(write(tmp_path, eagle_shape(shape, layers), tensors), target)
    feature_TE = noise(13, 32, seed=5)
    layer, _ = reference(target.config)
    x = F.linear(
        torch.cat((target.model.embed_tokens(TOKENS), feature_TE), -1), tensors["fc.weight"], tensors.get("fc.bias")
    )
    for i in range(layers):
        x = layer(x, tensors, f"layers.{i}.")
    wanted_logits = target.lm_head(x)
    if fused:
        fuse(target)
        fuse(head)
    state = head(head.fuse(feature_TE), TOKENS, SLOTS, dense)
    torch.testing.assert_close(state, x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(state), wanted_logits, atol=1e-5, rtol=1e-5)
    assert head.reads == TargetStates((), final=True)
    assert head.target_ids is None


def test_an_eagle_head_calls_attend_layer_by_layer(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    head = load(write(tmp_path, eagle_shape(shape, 3), eagle_tensors(3)), target)
    called = []

    def attend(layer: int, *qkv: Tensor) -> Tensor:
        called.append(layer)
        output: Tensor = dense(layer, *qkv)
        return output

    head(noise(13, 32), TOKENS, SLOTS, attend)
    assert called == [0, 1, 2]


def test_eagle_head_shares_the_targets_embeddings_and_context_length(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    head = load(write(tmp_path, eagle_shape(shape), eagle_tensors()), target)
    assert head.config.max_position_embeddings == 256
    assert not any(name.startswith(("embed", "lm_head")) for name in head.state_dict())


@torch.inference_mode()
def test_eagle_head_may_contain_its_own_embedding_and_lm_head(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    """A head may contain its own embedding and lm_head.

    SafeAILab's checkpoints contain embeddings; those of speculators contain both, with other names and a nested config.
    """
    tensors = eagle_tensors()
    own = {"embed_tokens.weight": noise(97, 32, seed=8), "lm_head.weight": noise(97, 32, seed=9)}
    plain = load(write(tmp_path / "a", eagle_shape(shape), tensors | own), target)
    renamed = {n.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): t for n, t in tensors.items()}
    nested = {
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": shape,
        "num_hidden_layers": 1,
    }
    speculators = load(write(tmp_path / "b", nested, renamed | own), target)
    without = load(write(tmp_path / "c", eagle_shape(shape), tensors), target)
    results = [h.logits(h(noise(13, 32), TOKENS, SLOTS, dense)) for h in (plain, speculators, without)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    target.model.embed_tokens.weight.copy_(own["embed_tokens.weight"])
    target.lm_head.weight.copy_(own["lm_head.weight"])
    assert torch.equal(without.logits(without(noise(13, 32), TOKENS, SLOTS, dense)), results[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64, this target has 32"),
        ({"vocab_size": 96}, "vocab_size is 96, the target's 97"),
        ({"add_para_norm": True}, "add_para_norm True is not supported"),
        ({"layernorms": True}, "layernorms True is not supported"),
        ({"bias": "no"}, "bias must be true or false"),
    ],
    ids=str,
)
def test_eagle_head_with_an_incompatible_config_is_refused(
    changes: dict[str, Any], message: str, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        load(write(tmp_path, eagle_shape(shape) | changes, eagle_tensors()), target)


def test_a_bias_that_the_config_excludes_is_refused(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match=r"fc\.bias is not part of this model"):
        load(write(tmp_path, eagle_shape(shape) | {"bias": False}, eagle_tensors()), target)
