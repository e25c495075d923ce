"""Small random networks, and an attention without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def dense(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return causal attention over the tokens of this pass, computed directly from its definition."""
    groups = q_THD.shape[1] // k_TKD.shape[1]
    k, v = k_TKD.repeat_interleave(groups, dim=1), v_TKD.repeat_interleave(groups, dim=1)
    scores_HQL = torch.einsum("qhd,lhd->hql", q_THD, k) / q_THD.shape[-1] ** 0.5
    future = torch.ones(scores_HQL.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hql,lhd->qhd", scores_HQL.masked_fill(future, -torch.inf).softmax(-1), v)


def randomise(module: nn.Module, seed: int) -> None:
    """Fill the parameters with values at which every part of the network matters; norms differ from one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)


@pytest.fixture
def shape() -> dict[str, Any]:
    """Return a config.json that a test may change."""
    return dict(SHAPE)


@pytest.fixture(name="dense")
def dense_attend() -> Any:
    return dense


@pytest.fixture(name="randomise")
def randomise_in_place() -> Any:
    return randomise


@pytest.fixture
def target(shape: dict[str, Any]) -> CausalLM:
    model = CausalLM(causal_lm_config(shape)).requires_grad_(False)
    randomise(model, 1)
    return model
