"""Tests of EAGLE heads against other implementations, rebuilt with transformers' layers, and of refusals by name.

EAGLE-1 and EAGLE-2 heads equal SafeAILab's cnets1.py, EAGLE-3 heads equal vLLM, P-EAGLE heads a plain computation.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specdecode_worker.contract import Method
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config, eagle_config, peagle_config
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.target_states import TargetStates
from support.worker.checkpoints import (
    SLOTS,
    TOKENS,
    Tensors,
    eagle3_tensors,
    eagle_tensors,
    first_layer,
    noise,
    norm,
    reference,
    write,
)
from support.worker.dense_attention import dense
from support.worker.small_folders import loaded_head


def eagle_shape(shape: dict[str, Any], layers: int = 1) -> dict[str, Any]:
    return shape | {"num_hidden_layers": layers, "max_position_embeddings": 4}


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_eagle_head_equals_cnets1(
    layers: int, bias: bool, fused: bool, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = eagle_tensors(layers, bias=bias)
    head = loaded_head("eagle", write(tmp_path, eagle_shape(shape, layers), tensors), target)
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


@torch.inference_mode()
def test_eagle_head_may_contain_its_own_embedding_and_lm_head(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    """SafeAILab's checkpoints contain embeddings; those of speculators both, with other names and a nested config."""
    tensors = eagle_tensors()
    own = {"embed_tokens.weight": noise(97, 32, seed=8), "lm_head.weight": noise(97, 32, seed=9)}
    plain = loaded_head("eagle", write(tmp_path / "a", eagle_shape(shape), tensors | own), target)
    renamed = {n.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): t for n, t in tensors.items()}
    nested = {
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": shape,
        "num_hidden_layers": 1,
    }
    speculators = loaded_head("eagle", write(tmp_path / "b", nested, renamed | own), target)
    without = loaded_head("eagle", write(tmp_path / "c", eagle_shape(shape), tensors), target)
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
        loaded_head("eagle", write(tmp_path, eagle_shape(shape) | changes, eagle_tensors()), target)


def test_a_bias_that_the_config_excludes_is_refused(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match=r"fc\.bias is not part of this model"):
        loaded_head("eagle", write(tmp_path, eagle_shape(shape) | {"bias": False}, eagle_tensors()), target)


EAGLE3: dict[str, dict[str, Any]] = {
    "as-published": {},
    "three-layers": {"num_hidden_layers": 3},
    "norm-before-residual": {"norm_before_residual": True},
    "norm-before-fc": {"norm_before_fc": True},
    "norm-before-fc-nested": {"eagle_config": {"norm_before_fc": True}},
    "fc-norm-and-norm-output": {"fc_norm": True, "norm_output": True},
    "two-states": {"num_aux_hidden_states": 2, "eagle_aux_hidden_state_layer_ids": [0, 4]},
    "final-state": {"eagle_config": {"use_aux_hidden_state": False}},
    "all-at-once": {"num_hidden_layers": 2, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("variant", EAGLE3)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_eagle3_head_equals_vllm(
    variant: str, fused: bool, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    config = EAGLE3[variant]
    nested = config.get("eagle_config", {})
    states = config.get("num_aux_hidden_states", 3) if nested.get("use_aux_hidden_state", True) else 0
    layers = config.get("num_hidden_layers", 1)
    tensors = eagle3_tensors(layers, states=states)
    aux = noise(13, 32 * (states or 1), seed=5)
    hidden = aux
    if "norm-before-fc" in variant:
        tensors["input_norm.weight"] = noise(96, seed=6)
        hidden = norm(hidden, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": noise(32, seed=30 + i) for i in range(3)}
        hidden = torch.cat(
            [norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(hidden.chunk(3, -1))], -1
        )
    hidden = hidden @ tensors["fc.weight"].T if states else hidden
    folder = write(tmp_path, shape | {"num_hidden_layers": 1, "draft_vocab_size": 40} | config, tensors)
    head = loaded_head("eagle3", folder, target)
    if fused:
        fuse(head)
    assert head.reads.width(32) == aux.shape[1]
    torch.testing.assert_close(head.fuse(aux), hidden, atol=1e-5, rtol=1e-5)

    layer, tables = reference(target.config)
    residual = norm(hidden, tensors["midlayer.hidden_norm.weight"]) if config.get("norm_before_residual") else hidden
    x = first_layer(tensors, target.model.embed_tokens(TOKENS), hidden, residual, tables, dense)
    for i in range(1, layers):
        x = layer(x, tensors, f"layers.{i}.")
    normed = norm(x, tensors["norm.weight"])
    state = head(head.fuse(aux), TOKENS, SLOTS, dense)
    torch.testing.assert_close(state, normed if config.get("norm_output") else x, atol=1e-5, rtol=1e-5)
    wanted_logits = normed @ tensors["lm_head.weight"].T
    torch.testing.assert_close(head.logits(state), wanted_logits, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_head_of_another_size_needs_its_own_embeddings(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    tensors = eagle3_tensors(size=16) | {"embed_tokens.weight": noise(97, 16)}
    config = shape | {"num_hidden_layers": 1, "hidden_size": 16, "target_hidden_size": 32, "draft_vocab_size": 40}
    head = loaded_head("eagle3", write(tmp_path, config, tensors), target)
    aux = noise(13, 96, seed=5)
    hidden = aux @ tensors["fc.weight"].T
    _, tables = reference(target.config, size=16)
    x = first_layer(tensors, tensors["embed_tokens.weight"][TOKENS], hidden, hidden, tables, dense)
    torch.testing.assert_close(head(head.fuse(aux), TOKENS, SLOTS, dense), x, atol=1e-5, rtol=1e-5)
    del tensors["embed_tokens.weight"]
    with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight is missing; a head of hidden_size 16"):
        loaded_head("eagle3", write(tmp_path, config, tensors), target)


@pytest.mark.parametrize(("kind", "read"), [("eagle3", eagle3_config), ("peagle", peagle_config)])
def test_nested_config_is_read(
    kind: Method, read: Any, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    layer = {name: shape[name] for name in shape if name != "architectures"} | {"head_dim": 8, "num_hidden_layers": 1}
    own = {"draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [0, 2, 4], "mask_token_id": 95}
    nested = own | {
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": False,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"proposal_type": "greedy"}]},
        "speculators_model_type": kind,
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    }
    assert read(nested, target.config) == read(shape | {"num_hidden_layers": 1} | own, target.config)
    del nested["norm_before_residual"]
    assert read(nested, target.config).norm_before_residual == (kind == "eagle3")
    mask = {"mask_hidden": noise(1, 1, 96)} if kind == "peagle" else {}
    head = loaded_head(kind, write(tmp_path, nested, eagle3_tensors() | mask), target)
    assert head.reads == TargetStates((0, 2, 4))


@pytest.mark.parametrize(
    ("written", "read", "word"),
    [
        ([1, 2, 3], (2, 3, 4), "outputs"),
        ([2, 3, 4], (2, 3, 4), "inputs"),
        ([1, 1, 0], (1, 1, 0), "inputs"),
        ([1, 4], (2, 5), "outputs"),
        ([0, 5], (0, 5), "inputs"),
    ],
    ids=str,
)
def test_layer_ids_of_both_conventions_are_read_and_logged(
    written: list[int], read: tuple[int, ...], word: str, target: CausalLM, shape: dict[str, Any], caplog: Any
) -> None:
    with caplog.at_level(logging.INFO):
        config = eagle3_config(shape | {"eagle_aux_hidden_state_layer_ids": written}, target.config)
    assert config.aux_layers == read
    assert f"name {word} of layers: reading the inputs of layers {list(read)}" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, "layer_types"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "heads are read unquantized"),
    ],
    ids=["layer types", "window", "quantized"],
)
@pytest.mark.parametrize("read", [eagle3_config, eagle_config])
def test_windows_and_quantized_heads_are_refused(
    read: Any, change: dict[str, Any], message: str, target: CausalLM, shape: dict[str, Any]
) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        read(shape | change, target.config)
    neutral = {"layer_types": ["full_attention"], "sliding_window": 4, "use_sliding_window": False}
    neutral |= {"quantization_config": {}}
    assert read(shape | neutral, target.config) == read(shape, target.config)


def test_norms_that_exclude_each_other_are_refused(target: CausalLM, shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigMismatch, match="exclude each other"):
        eagle3_config(shape | {"fc_norm": True, "norm_before_fc": True}, target.config)


def test_rotary_frequencies_of_old_exporters_are_ignored(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    config = shape | {"num_hidden_layers": 1, "draft_vocab_size": 40, "max_position_embeddings": 8}
    tensors = eagle3_tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.full((4,), torch.nan)}
    head = loaded_head("eagle3", write(tmp_path, config, tensors), target)
    assert torch.equal(head.rope.cos_PD, target.rope.cos_PD)


MASK = 95
MASKED = torch.arange(13) >= 10
"""The last three slots of the pass are mask slots."""


def peagle_tensors(layers: int = 2) -> Tensors:
    """Return the tensors of a P-EAGLE head as speculators stores them, with the state of its mask slots."""
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3_tensors(layers).items()}
    return named | {"mask_hidden": noise(1, 1, 96, seed=8)}


def peagle_shape(shape: dict[str, Any], **change: Any) -> dict[str, Any]:
    return shape | {"num_hidden_layers": 2, "draft_vocab_size": 40, "mask_token_id": MASK} | change


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_peagle_head_equals_a_plain_computation(
    fused: bool, norm_before_residual: bool, target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = peagle_tensors()
    head = loaded_head(
        "peagle", write(tmp_path, peagle_shape(shape, norm_before_residual=norm_before_residual), tensors), target
    )
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


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_mask_token_has_three_names(name: str, target: CausalLM, shape: dict[str, Any]) -> None:
    config = peagle_shape(shape, mask_token_id=None) | {name: 7}
    assert peagle_config(config, target.config).mask_token_id == 7


@pytest.mark.parametrize("stored", [(96,), (1, 96), (1, 1, 96)], ids=str)
def test_mask_state_may_be_stored_flat(
    stored: tuple[int, ...], target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    tensors = peagle_tensors()
    changed = tensors | {"mask_hidden": tensors["mask_hidden"].view(stored)}
    head = loaded_head("peagle", write(tmp_path, peagle_shape(shape), changed), target)
    aux = noise(13, 96, seed=5)
    wanted = torch.where(MASKED[:, None], tensors["mask_hidden"].flatten(), aux) @ tensors["fc.weight"].T
    torch.testing.assert_close(head.masked_states(aux, MASKED), wanted)


def test_a_mask_state_of_another_size_is_refused(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, peagle_shape(shape), peagle_tensors() | {"mask_hidden": torch.zeros(1, 1, 95)})
    with pytest.raises(WeightMismatch, match=r"mask_hidden has shape \[1, 1, 95\]"):
        loaded_head("peagle", folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "needs one of mask_token_id, pard_token, ptd_token_id"),
        ({"mask_token_id": 97}, r"mask_token_id must be an integer in 0\.\.96, got 97"),
        ({"pard_token": 3}, "mask_token_id and pard_token name different tokens"),
        ({"parallel_drafting": False}, "parallel_drafting false is no P-EAGLE head"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_config_of_a_peagle_head_is_refused(
    change: dict[str, Any], message: str, target: CausalLM, shape: dict[str, Any]
) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        peagle_config(peagle_shape(shape, **change), target.config)
