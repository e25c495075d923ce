"""Tests of EAGLE-3 heads against vLLM's computation, rebuilt with transformers' layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config, eagle_config
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import load_head, prepare_eagle3
from support.worker.checkpoints import CPU, SLOTS, TOKENS, eagle3_tensors, first_layer, noise, norm, reference, write
from support.worker.dense_attention import dense


def load3(folder: Path, target: CausalLM) -> Eagle3Head:
    return load_head(prepare_eagle3(folder, target), target, dtype=torch.float32, device=CPU)


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
    head = load3(folder, target)
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
    head = load3(write(tmp_path, config, tensors), target)
    aux = noise(13, 96, seed=5)
    hidden = aux @ tensors["fc.weight"].T
    _, tables = reference(target.config, size=16)
    x = first_layer(tensors, tensors["embed_tokens.weight"][TOKENS], hidden, hidden, tables, dense)
    torch.testing.assert_close(head(head.fuse(aux), TOKENS, SLOTS, dense), x, atol=1e-5, rtol=1e-5)
    del tensors["embed_tokens.weight"]
    with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight is missing; a head of hidden_size 16"):
        load3(write(tmp_path, config, tensors), target)


def test_nested_config_of_speculators_is_read(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    layer = {name: shape[name] for name in shape if name != "architectures"} | {"head_dim": 8, "num_hidden_layers": 1}
    nested = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy"}]},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    }
    flat = shape | {"num_hidden_layers": 1, "draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    assert eagle3_config(nested, target.config) == eagle3_config(flat, target.config)
    del nested["norm_before_residual"]
    assert eagle3_config(nested, target.config).norm_before_residual
    head = load3(write(tmp_path, nested, eagle3_tensors()), target)
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
    "window", [{"layer_types": ["sliding_attention"], "sliding_window": 4}, {"use_sliding_window": True}], ids=str
)
@pytest.mark.parametrize("read", [eagle3_config, eagle_config])
def test_windows_of_a_head_are_refused(
    read: Any, window: dict[str, Any], target: CausalLM, shape: dict[str, Any]
) -> None:
    with pytest.raises(ConfigMismatch, match=r"layer_types|use_sliding_window"):
        read(shape | window, target.config)
    neutral = {"layer_types": ["full_attention"], "sliding_window": 4, "use_sliding_window": False}
    assert read(shape | neutral, target.config) == read(shape, target.config)


def test_an_empty_quantization_config_means_none(target: CausalLM, shape: dict[str, Any]) -> None:
    assert eagle3_config(shape | {"quantization_config": {}}, target.config) == eagle3_config(shape, target.config)
    with pytest.raises(ConfigMismatch, match="heads are read unquantized"):
        eagle3_config(shape | {"quantization_config": {"quant_method": "fp8"}}, target.config)


def test_norms_that_exclude_each_other_are_refused(target: CausalLM, shape: dict[str, Any]) -> None:
    with pytest.raises(ConfigMismatch, match="exclude each other"):
        eagle3_config(shape | {"fc_norm": True, "norm_before_fc": True}, target.config)


def test_rotary_frequencies_of_old_exporters_are_ignored(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    config = shape | {"num_hidden_layers": 1, "draft_vocab_size": 40, "max_position_embeddings": 8}
    tensors = eagle3_tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.full((4,), torch.nan)}
    head = load3(write(tmp_path, config, tensors), target)
    assert torch.equal(head.rope.cos_PD, target.rope.cos_PD)
