"""Llama 4 against transformers: same folder, same logits, before and after fusion; and its published configs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, WorkerConfig
from specdecode_worker.engine.memory import Device, network_of, take_inventory
from specdecode_worker.models import linear
from specdecode_worker.models.arch import causal_lm_config, new_network
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import Temperature
from specdecode_worker.models.drafts import expect_draft_model
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.linear import Linear, Shard, Split
from specdecode_worker.models.optimize import added_bytes, fuse, quantise_target
from specdecode_worker.models.tensor_parallel import load_shard, split_network
from specdecode_worker.models.unloaded import meta_init
from specdecode_worker.models.weights import load_causal_lm, prepare_causal_lm
from specdecode_worker.training.errors import DraftNotTrainable
from specdecode_worker.training.heads import new_draft_model, new_eagle, new_head
from specdecode_worker.training.rollout import read_states
from support.small_llama4 import SHAPE, dense_chunks, save_llama4, write_quantized_llama4
from support.worker.quantized_folders import int4, pack_quantized, write_sparse

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(4))
VARIANTS: dict[str, dict[str, Any]] = {
    "dense-and-expert-layers": {},
    "text-part-of-a-model-with-images": {"images": True},
    "all-expert": {"interleave_moe_layer_step": 1},
    "without-qk-norm": {"use_qk_norm": False},
    "all-expert-without-qk-norm": {"interleave_moe_layer_step": 1, "use_qk_norm": False},
    "biases": {"attention_bias": True},
    "equal-llama3-factors": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        }
    },
    "without-temperature": {"attn_temperature_tuning": False},
    "whole-attention-that-rotates": {"layer_types": ["full_attention", "chunked_attention"] * 4},
    "no-chunks": {"layer_types": ["full_attention"] * 8},
}


@torch.inference_mode()
def logits(model: CausalLM) -> Tensor:
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), dense_chunks(model.config)).hidden_TE)


@torch.inference_mode()
def saved(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Tensor:
    """Save a model and return transformers' logits of one pass without a cache."""
    torch.set_num_threads(1)
    wanted: Tensor = save_llama4(folder, dtype, **changes)(TOKENS[None], use_cache=False).logits[0]
    assert wanted.std() > 0.3, "logits must be large enough for 1e-5 to mean something"
    return wanted


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = saved(tmp_path, dtype, **VARIANTS[variant])
    ours = load_causal_lm(tmp_path, dtype=dtype, device=CPU)
    torch.testing.assert_close(logits(ours), wanted, atol=1e-5, rtol=1e-5)
    fuse(ours)
    torch.testing.assert_close(logits(ours), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_bf16_is_packed(tmp_path: Path) -> None:
    """On a CPU with bf16 support, a packed network is as close to fp32 as the plain one."""
    wanted = saved(tmp_path)
    ours = load_causal_lm(tmp_path, dtype=torch.bfloat16, device=CPU)
    plain_error = (logits(ours).float() - wanted).abs().mean()
    fuse(ours)
    assert (logits(ours).float() - wanted).abs().mean() < 1.5 * plain_error


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_scales_and_biases_move_with_their_rows(kind: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_NK = torch.randn(16, 32, generator=generator) * torch.arange(1, 17)[:, None]
    matrix = Linear.of(weight_NK, torch.arange(16.0), split=Split.OUTPUTS).quantize(kind, CPU, stored=True)
    x_TK, order_N = torch.randn(3, 32, generator=generator), torch.randperm(16, generator=generator)
    wanted = matrix(x_TK)[:, order_N]
    matrix.reorder(order_N)
    torch.testing.assert_close(matrix(x_TK), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_parts_of_the_ranks_sum_to_the_whole(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, with one all-reduce for attention and one for the MLP or the experts. There are two KV heads."""
    save_llama4(tmp_path, torch.float64, num_attention_heads=8, head_dim=8, num_hidden_layers=4)
    whole = load_causal_lm(tmp_path, dtype=torch.float64, device=CPU)
    parts = [load_shard(tmp_path, Shard(rank, size), dtype=torch.float64, device=CPU) for rank in range(size)]
    reduces: list[int] = []
    monkeypatch.setattr(linear.collectives, "all_reduce", lambda tensor: reduces.append(1))
    positions_T, attend = torch.arange(len(TOKENS)), dense_chunks(whole.config)
    x_TE = torch.randn(40, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rope = whole.rope.at(positions_T, x_TE.dtype)
    for layer, block in enumerate(whole.model.layers):
        attended = [part.model.layers[layer].self_attn(layer, x_TE, rope, attend) for part in parts]
        torch.testing.assert_close(sum(attended), block.self_attn(layer, x_TE, rope, attend))
        torch.testing.assert_close(sum(part.model.layers[layer].mlp(x_TE) for part in parts), block.mlp(x_TE))
    assert len(reduces) == 2 * size * 4
    assert parts[0].config.num_key_value_heads == max(2 // size, 1)


def published(**changes: Any) -> dict[str, Any]:
    """Return the text part of the published config of Scout, with ``changes`` for those of Maverick."""
    text = {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "use_qk_norm": True,
        "vocab_size": 202048,
        **changes,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": text,
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408},
    }


MAVERICK = {
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}


def test_published_configs_load_as_they_are() -> None:
    scout = causal_lm_config(published(), 32768)
    assert scout.max_position_embeddings == 32768, "tables of rotary positions are as long as texts may be"
    assert scout.eos_token_ids == (200001, 200007, 200008)
    assert {kind.experts for kind in scout.layer_kinds} == {16}
    assert [i for i, kind in enumerate(scout.layer_kinds) if not kind.rotates] == list(range(3, 48, 4))
    assert [kind.chunked for kind in scout.layer_kinds] == [kind.rotates for kind in scout.layer_kinds]
    assert scout.temperature == Temperature(floor=8192, scale=0.1)
    maverick = causal_lm_config(published(**MAVERICK), 32768)
    assert [i for i, kind in enumerate(maverick.layer_kinds) if kind.experts] == list(range(1, 48, 2))
    assert (maverick.widest_mlp, maverick.qk_norm, maverick.rope_scaling) == (16384, False, None)
    assert causal_lm_config(published()).max_position_embeddings == 2**20


def test_short_texts_need_neither_chunks_nor_temperature() -> None:
    config = causal_lm_config(published(), 8192)
    assert config.attention_chunk_size == 0
    assert not any(kind.chunked for kind in config.layer_kinds)
    assert config.temperature is not None, "position 8191 is the first with a factor"
    assert causal_lm_config(published(), 8191).temperature is None
    assert causal_lm_config(published(), 8193).attention_chunk_size == 8192


def test_chunks_have_a_default_that_null_turns_off() -> None:
    config = published()
    del config["text_config"]["attention_chunk_size"]
    assert causal_lm_config(config, 8193).attention_chunk_size == 8192
    assert causal_lm_config(published(attention_chunk_size=None), 8193).attention_chunk_size == 0


@pytest.mark.parametrize(("value", "tunes"), [(4, True), (0, False), (True, True), (False, False)])
def test_temperature_tuning_is_a_number_or_a_boolean(value: Any, tunes: bool) -> None:
    assert (causal_lm_config(published(attn_temperature_tuning=value)).temperature is not None) == tunes


def test_kinds_of_layers_are_read_from_lists() -> None:
    config = causal_lm_config(published(no_rope_layers=[1, 1, 0, 0] * 12, moe_layers=[5], attention_chunk_size=None))
    assert [kind.rotates for kind in config.layer_kinds] == [True, True, False, False] * 12
    assert [i for i, kind in enumerate(config.layer_kinds) if kind.experts] == [5]
    assert not any(kind.chunked for kind in config.layer_kinds)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        ({"no_rope_layers": [1, 0]}, "must have 48 entries"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
        ({"intermediate_size_mlp": -1}, "intermediate_size_mlp"),
    ],
    ids=str,
)
def test_unsupported_fields_are_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigMismatch, match=problem):
        causal_lm_config(published(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 3}], ids=str)
def test_heads_train_on_its_states(changes: dict[str, Any], tmp_path: Path) -> None:
    """Recorded states are those of chunks, and a new head starts from the shared expert, or from a dense layer."""
    wanted = saved(tmp_path, **changes)
    target = load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(target.logits(read_states(target, TOKENS)[1]), wanted, atol=1e-5, rtol=1e-5)
    last: Any = target.model.layers[-1]
    head, eagle = new_head(target, torch.arange(97)), new_eagle(target)
    first: Any = eagle.layers[0]
    source = last.mlp if changes else last.mlp.shared_expert
    for mlp in (head.midlayer.mlp, first.mlp):
        assert torch.equal(mlp.gate_proj.weight, source.gate_proj.weight)


@pytest.mark.slow
def test_it_is_no_draft_model(tmp_path: Path) -> None:
    save_llama4(tmp_path)
    with pytest.raises(ConfigMismatch, match="served as a target, not as a draft model"):
        expect_draft_model(tmp_path, None)
    target = load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)
    with pytest.raises(DraftNotTrainable, match="take --method eagle3"):
        new_draft_model(target, 2)


def test_quantized_at_load_on_a_cpu() -> None:
    """The rounded weights are plain ones, and the router keeps its own."""
    fields = SHAPE | {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 2}
    model = new_network(causal_lm_config(fields)).requires_grad_(False)
    assert added_bytes(model, "int8", torch.bfloat16, torch.device("cuda"), draft=False) < 0
    assert added_bytes(model, "int8", torch.bfloat16, CPU, draft=False) == 0
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    quantise_target(model, "int4", CPU)
    changed = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in changed
    assert "model.layers.1.mlp.router.weight" not in changed


@pytest.mark.parametrize("ordered", [False, True])
def test_experts_of_a_checkpoint_are_of_one_format_on_a_gpu(ordered: bool, tmp_path: Path) -> None:
    """They are counted in it; act-order is refused before anything is loaded, and served on a CPU."""
    packer = partial(pack_quantized, symmetric=True, ordered=ordered)
    write_quantized_llama4(tmp_path, int4(packer, group=32, ordered=ordered), num_hidden_layers=2)
    model = prepare_causal_lm(tmp_path).network
    assert model.form.startswith("compressed-tensors pack-quantized: int4 in groups of 32, F16 scales")
    assert added_bytes(model, None, torch.bfloat16, CPU, draft=False) == 0
    if ordered:
        with pytest.raises(ConfigMismatch, match="act-order are not served on a GPU"):
            added_bytes(model, None, torch.bfloat16, torch.device("cuda"), draft=False)
        return
    # four experts and a shared one, a dense layer, and attention of two layers, without their router
    weights = 5 * 3 * 64 * 64 + 3 * 64 * 96 + 2 * 64 * (64 + 32 + 32 + 64)
    saved = weights * 2 - weights // 2 - weights // 32 * 2
    assert added_bytes(model, None, torch.bfloat16, torch.device("cuda"), draft=False) == -saved


def test_memory_counts_all_experts_and_the_widest_layer() -> None:
    """One of eight devices of four layers of Maverick: it has an eighth of each expert, and one key-value head."""
    with meta_init():
        whole = new_network(causal_lm_config(published(**MAVERICK, num_hidden_layers=4), 32768))
    part = split_network(whole, Shard(0, 8))
    sizes = network_of("target", part, torch.bfloat16, CPU, None, draft=False)
    # experts, shared experts, dense layers, attention; embeddings whole and an eighth of lm_head; routers and norms
    matrices = 2 * 129 * 3 * 5120 * 1024 + 2 * 3 * 5120 * 2048 + 4 * 2 * 5120 * (640 + 128)
    assert sizes.weights == 2 * (matrices + 202048 * 5120 * 9 // 8 + 2 * 128 * 5120 + 9 * 5120)
    assert (sizes.intermediate_size, sizes.kv_heads, sizes.kv_layers) == (2048, 1, 4)
    assert sizes.tables < 64 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "form", "gpus", "weights", "tokens"),
    [({}, "bf16", 4, 51.64, 219_488), ({}, "fp8", 2, 53.56, 88_496), (MAVERICK, "fp8", 8, 49.04, 552_784)],
    ids=["scout", "scout-fp8", "maverick-fp8"],
)
def test_targets_of_real_size_are_budgeted_from_their_headers(
    changes: dict[str, Any], form: str, gpus: int, weights: float, tokens: int, tmp_path: Path
) -> None:
    """Figures of docs/how-to/serve-quantized-and-llama-4.md: GPUs of 80 GiB, texts of 16,384 tokens, no draft."""
    write_sparse(tmp_path, published(**changes), form, part=".mlp.", max_model_len=16384)
    model = ModelConfig(uri=str(tmp_path), served_name="m", max_model_len=16384)
    engine = EngineConfig(device="cuda", tensor_parallel_size=gpus, max_num_seqs=16, gpu_memory_utilization=0.8)
    config = WorkerConfig(model=model, draft=DraftConfig(method="none"), engine=engine)
    memory = Device(kind="cuda", limit=80 * 2**30, free=80 * 2**30, source="GPU memory", count=gpus)
    budget = take_inventory(config, Path, torch.device("cuda"), memory).budget
    assert budget.target.weights / 2**30 == pytest.approx(weights, abs=0.01)
    assert budget.room_tokens == pytest.approx(tokens, rel=0.005)
