"""Every family against transformers: same folder, same logits, before and after fusion.

Drafts read the target's states in order, also its final one, and one pass returns the states of several drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import load_causal_lm
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(4))
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Llama", {"num_key_value_heads": 2}),
    "one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "every-head-its-own": ("Llama", {"num_key_value_heads": 4}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope-tied-wide-heads": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    "another-eps": ("Llama", {"rms_norm_eps": 1e-2}),
    "llama-attention-bias": ("Llama", {"attention_bias": True}),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True}),
    "llama-all-biases-tied": ("Llama", {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 3.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-one-kv-head": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-yarn-with-factor": ("Qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0}}),
    "qwen2-yarn-mscale": ("Qwen2", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}}),
    "qwen2-yarn-untruncated": ("Qwen2", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 4.0}}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-wide-heads": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3-head-dim-by-default": ("Qwen3", {"head_dim": 128}),
    "qwen3-attention-bias": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-wide-heads": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window-that-is-never-full": ("Mistral", {"sliding_window": 256}),
}


def saved(folder: Path, shape: dict[str, Any], variant: str) -> Any:
    """Return a random transformers model, saved to ``folder`` by transformers."""
    import transformers

    family, changes = VARIANTS[variant]
    fields = {key: value for key, value in shape.items() if key != "architectures"}
    known = {"rope_parameters": PLAIN, "tie_word_embeddings": False, **fields, **changes}
    config = getattr(transformers, f"{family}Config")(**known)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(model, 1)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def our_logits(model: CausalLM) -> Tensor:
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), dense).hidden_TE)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_plain_and_fused(variant: str, shape: dict[str, Any], tmp_path: Path) -> None:
    wanted = saved(tmp_path, shape, variant)(TOKENS[None]).logits[0]
    assert wanted.std() > 0.3, "logits must be large enough for 1e-5 to mean something"
    ours = load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(our_logits(ours), wanted, atol=1e-5, rtol=1e-5)
    fuse(ours)
    assert sum(name.endswith("qkv_proj") for name, _ in ours.named_modules()) == 5
    torch.testing.assert_close(our_logits(ours), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@torch.inference_mode()
def test_aux_states_are_the_inputs_of_layers(shape: dict[str, Any], tmp_path: Path) -> None:
    """The auxiliary states equal transformers' hidden_states[i], which is the input of layer i."""
    theirs = saved(tmp_path, shape, "grouped")
    ours = load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)
    states = theirs(TOKENS[None], output_hidden_states=True).hidden_states
    aux_states = ours(TOKENS, torch.arange(len(TOKENS)), dense, TargetStates((0, 2, 4))).aux_TA
    torch.testing.assert_close(aux_states, torch.cat([states[i][0] for i in (0, 2, 4)], dim=-1), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_older_transformers_configs_are_equivalent(shape: dict[str, Any], tmp_path: Path) -> None:
    """A config with top-level rope_theta and rope_scaling, as before transformers 5, gives the same logits."""
    saved(tmp_path, shape, "llama3-rope")
    wanted = our_logits(load_causal_lm(tmp_path, dtype=torch.float32, device=CPU))
    config = json.loads((tmp_path / "config.json").read_text())
    nested = config.pop("rope_parameters")
    old = config | {"rope_theta": nested.pop("rope_theta"), "rope_scaling": nested}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert torch.equal(our_logits(load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)), wanted)


def mistral(shape: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return shape | {"architectures": ["MistralForCausalLM"]} | changes


def qwen2(shape: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return shape | {"architectures": ["Qwen2ForCausalLM"]} | changes


def test_sliding_window_below_the_context_length_is_refused(shape: dict[str, Any]) -> None:
    config = mistral(shape, sliding_window=100)
    with pytest.raises(ConfigMismatch, match="sliding_window 100 is below the longest text of 256 tokens"):
        causal_lm_config(config)
    with pytest.raises(ConfigMismatch, match="set max_model_len to 100 or less"):
        causal_lm_config(config, max_model_len=101)
    assert causal_lm_config(config, max_model_len=100).position_limit == 256


def test_disabled_sliding_windows_are_ignored(shape: dict[str, Any]) -> None:
    causal_lm_config(mistral(shape, sliding_window=None))
    causal_lm_config(mistral(shape))  # transformers' default of 4096 is longer than this model's texts
    with pytest.raises(ConfigMismatch, match="sliding_window 4096"):
        causal_lm_config(mistral(shape, max_position_embeddings=8192))
    causal_lm_config(qwen2(shape, sliding_window=8, use_sliding_window=False))
    causal_lm_config(qwen2(shape, sliding_window=8, use_sliding_window=True, layer_types=["full_attention"] * 5))
    causal_lm_config(qwen2(shape, sliding_window=8, use_sliding_window=True))  # from layer 28 on
    causal_lm_config(qwen2(shape, sliding_window=8, use_sliding_window=True, max_window_layers=5))
    with pytest.raises(ConfigMismatch, match="sliding_window 8"):
        causal_lm_config(qwen2(shape, sliding_window=8, use_sliding_window=True, max_window_layers=4))
    types = ["full_attention"] * 4 + ["sliding_attention"]
    with pytest.raises(ConfigMismatch, match="sliding_window 4096"):
        causal_lm_config(qwen2(shape, use_sliding_window=True, layer_types=types, max_position_embeddings=8192))
    with pytest.raises(ConfigMismatch, match="layer_types"):
        causal_lm_config(qwen2(shape, layer_types=["linear_attention"]))


def test_yarn_factor_multiplies_the_context_length(shape: dict[str, Any]) -> None:
    config = qwen2(shape, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200})
    assert causal_lm_config(config).max_position_embeddings == 800


def test_rope_scaling_beside_rope_parameters(shape: dict[str, Any]) -> None:
    """A file whose objects differ is refused: transformers takes rope_scaling alone."""
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for scaling in (old, PLAIN | {"rope_theta": 1e6}):
        with pytest.raises(ConfigMismatch, match="rope_parameters and rope_scaling differ; keep one of them"):
            causal_lm_config(shape | {"rope_parameters": PLAIN, "rope_scaling": scaling})
    config = causal_lm_config(shape | {"rope_parameters": YARN, "rope_scaling": old})
    assert (config.rope_theta, config.rope_scaling) == (
        1000.0,
        causal_lm_config(shape | {"rope_scaling": old}).rope_scaling,
    )
    assert causal_lm_config(shape | {"rope_parameters": YARN, "rope_scaling": None}).rope_scaling
    assert causal_lm_config(shape | {"rope_parameters": {}, "rope_scaling": old}).rope_scaling


def test_texts_of_models_with_huge_limits_are_bounded_by_max_model_len(shape: dict[str, Any]) -> None:
    """The tables of rotary positions have a row for each position that is served, and not for each of config.json."""
    yarn = {"type": "yarn", "factor": 1e5, "original_max_position_embeddings": 4096}
    for raw in (shape | {"max_position_embeddings": 2**26}, shape | {"rope_scaling": yarn}):
        with pytest.raises(ConfigMismatch, match="set max_model_len to 33554432 or less"):
            causal_lm_config(raw, max_model_len=2**25 + 1)
        config = causal_lm_config(raw, max_model_len=8192)
        assert config.max_position_embeddings == 8192
        assert eagle3_config(shape, config).max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*is not supported; LlamaForCausalLM, Llama4"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads must be an integer in 1\.\.4"),
        ({"hidden_size": 30}, "hidden_size 30 is no multiple of 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"vocab_size": 10**30}, "vocab_size .* got a huge number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be integers"),
        (
            {"max_position_embeddings": 2**26},
            "texts of 67108864 tokens are too long for head_dim 8; set max_model_len to",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported; default"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be a number from 1 on"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": PLAIN}}, "full_attention: rotary positions that differ by layer"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": 1}, "rope_theta"),
    ],
    ids=str,
)
def test_unsupported_config_field_is_refused_by_name(
    changes: dict[str, Any], message: str, shape: dict[str, Any]
) -> None:
    with pytest.raises(ConfigMismatch, match=message):
        causal_lm_config(shape | changes)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"])
def test_missing_required_field_is_named(name: str, shape: dict[str, Any]) -> None:
    del shape[name]
    with pytest.raises(ConfigMismatch, match=f"{name} must be"):
        causal_lm_config(qwen2(shape))


def test_family_is_read_from_model_type_if_architectures_are_missing(shape: dict[str, Any]) -> None:
    del shape["architectures"]
    assert causal_lm_config(shape | {"model_type": "qwen3"}).qk_norm
    assert causal_lm_config(shape | {"model_type": "qwen2"}).qkv_bias
    assert not causal_lm_config(shape).qkv_bias


def read(target: CausalLM, reads: TargetStates) -> Tensor:
    states = target(TOKENS, torch.arange(len(TOKENS)), dense, reads).aux_TA
    assert isinstance(states, Tensor)
    return states


def test_no_states_are_returned_unless_requested(target: CausalLM) -> None:
    assert target(TOKENS, torch.arange(len(TOKENS)), dense).aux_TA is None
    assert not TargetStates()
    assert TargetStates().width(32) == 0


def test_states_come_in_the_order_asked_for(target: CausalLM) -> None:
    rising, falling = read(target, TargetStates((1, 4))), read(target, TargetStates((4, 1)))
    assert torch.equal(rising.unflatten(-1, (2, 32)).flip(1).flatten(1), falling)
    assert torch.equal(read(target, TargetStates((1, 1))), rising[:, :32].repeat(1, 2))


def test_final_state_is_normed_and_last(target: CausalLM) -> None:
    states = read(target, TargetStates((0, 5), final=True))
    assert states.shape == (len(TOKENS), TargetStates((0, 5), final=True).width(32)) == (len(TOKENS), 96)
    assert torch.equal(states[:, :32], target.model.embed_tokens(TOKENS))
    assert torch.equal(target.model.norm(states[:, 32:64]), states[:, 64:])
    assert torch.equal(states[:, 64:], target(TOKENS, torch.arange(len(TOKENS)), dense).hidden_TE)


@pytest.mark.parametrize(
    "part",
    [TargetStates((3, 1)), TargetStates((), final=True), TargetStates((2,), final=True), TargetStates((1, 1))],
    ids=str,
)
def test_states_of_one_draft_are_selected_from_a_shared_pass(part: TargetStates, target: CausalLM) -> None:
    whole = part | TargetStates((2, 0), final=True)
    assert whole.layers == tuple(sorted(set(whole.layers)))
    pieces = read(target, whole).unflatten(-1, (-1, 32))[:, list(whole.indices_of(part))]
    assert torch.equal(pieces.flatten(1), read(target, part))
