"""Small random networks, and an attention without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from support.worker import small_folders
from support.worker.dense_attention import dense

SHAPE: dict[str, Any] = small_folders.SHAPE | {"num_hidden_layers": 5}


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
