"""Tests of Medusa heads against the arithmetic of FasterDecoding's medusa_model.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.target_states import TargetStates
from support.worker.checkpoints import medusa_tensors, noise, write
from support.worker.small_folders import loaded_head


def with_vllm_names(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Rename the tensors to vLLM's names, as its converters write them."""
    renamed = {}
    for name, tensor in tensors.items():
        h, i, kind = name.split(".", 2)
        is_matrix = int(i) == layers
        renamed[f"lm_heads.{h}.weight" if is_matrix else f"blocks.{h}.layers.{i}.{kind.removeprefix('linear.')}"] = (
            tensor
        )
    return renamed


@torch.inference_mode()
@pytest.mark.parametrize(("heads", "layers", "bias"), [(4, 1, True), (2, 3, True), (3, 1, False)])
@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
def test_medusa_heads_equal_the_original_of_fasterdecoding(
    heads: int, layers: int, bias: bool, prefix: str, target: CausalLM, tmp_path: Path
) -> None:
    tensors = medusa_tensors(heads, layers, bias=bias)
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "x/y"}
    medusa_heads = loaded_head(
        "medusa", write(tmp_path, config, {prefix + name: t for name, t in tensors.items()}), target
    )
    hidden = noise(5, 32, seed=4)
    logits = medusa_heads.logits(hidden)
    assert logits.shape == (medusa_heads.count, 5, 97) == (heads, 5, 97)
    for h in range(heads):
        x = hidden
        for i in range(layers):
            x = x + F.silu(F.linear(x, tensors[f"{h}.{i}.linear.weight"], tensors.get(f"{h}.{i}.linear.bias")))
        torch.testing.assert_close(logits[h], x @ tensors[f"{h}.{layers}.weight"].T, atol=1e-5, rtol=1e-5)
    fuse(medusa_heads)
    torch.testing.assert_close(medusa_heads.logits(hidden), logits, atol=1e-5, rtol=1e-5)
    assert medusa_heads.reads == TargetStates((), final=True)
    assert medusa_heads.target_ids is None


@torch.inference_mode()
def test_vllm_names_and_a_truncated_vocabulary_load(target: CausalLM, tmp_path: Path) -> None:
    plain = medusa_tensors(3, 1, rows=40)
    config = {
        "model_type": "medusa",
        "num_heads": 3,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "vocab_size": 97,
        "truncated_vocab_size": 40,
    }
    token_map = torch.randperm(97, generator=torch.Generator().manual_seed(1))[:40]
    medusa_heads = loaded_head(
        "medusa", write(tmp_path, config, with_vllm_names(plain, 1) | {"token_map": token_map}), target
    )
    assert medusa_heads.target_ids is not None
    assert torch.equal(medusa_heads.target_ids, token_map)
    same = {"medusa_num_heads": 3, "truncated_vocab_size": 40}
    other = loaded_head("medusa", write(tmp_path / "b", same, plain | {"token_map": token_map}), target)
    assert torch.equal(medusa_heads.logits(noise(5, 32)), other.logits(noise(5, 32)))
    token_map[7] = 97
    with pytest.raises(WeightMismatch, match="token_map maps outside"):
        loaded_head("medusa", write(tmp_path, config, with_vllm_names(plain, 1) | {"token_map": token_map}), target)


def test_medusa_heads_are_loaded_strictly(target: CausalLM, tmp_path: Path) -> None:
    tensors = medusa_tensors(3, 1)
    with pytest.raises(WeightMismatch, match=r"2\.0\.linear\.bias is not part of this model \(3 extra"):
        loaded_head("medusa", write(tmp_path, {"medusa_num_heads": 2}, tensors), target)
    with pytest.raises(WeightMismatch, match=r"blocks\.3\.layers\.0\.bias is missing \(3 missing"):
        loaded_head("medusa", write(tmp_path, {"medusa_num_heads": 4}, tensors), target)
    config = {"medusa_num_heads": 1, "truncated_vocab_size": 90}
    with pytest.raises(WeightMismatch, match=r"0\.1\.weight has shape \[97, 32\], config\.json asks for \[90, 32\]"):
        loaded_head("medusa", write(tmp_path, config, medusa_tensors(1, 1) | {"token_map": torch.arange(90)}), target)
    with pytest.raises(ConfigMismatch, match="original_lm_head True"):
        loaded_head("medusa", write(tmp_path, {"medusa_num_heads": 3, "original_lm_head": True}, tensors), target)
    with pytest.raises(ConfigMismatch, match="num_heads must be an integer"):
        loaded_head("medusa", write(tmp_path, {}, tensors), target)
