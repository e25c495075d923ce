"""A small random network."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from support.worker import small_folders
from support.worker.small_folders import randomise

SHAPE: dict[str, Any] = small_folders.SHAPE | {"num_hidden_layers": 5}


@pytest.fixture
def shape() -> dict[str, Any]:
    """Return a config.json that a test may change."""
    return dict(SHAPE)


@pytest.fixture
def target(shape: dict[str, Any]) -> CausalLM:
    model = CausalLM(causal_lm_config(shape)).requires_grad_(False)
    randomise(model, 1)
    return model
