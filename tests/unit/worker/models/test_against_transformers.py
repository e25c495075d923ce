"""Our Llama gives the same logits as transformers' LlamaForCausalLM from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import load_causal_lm

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {"num_key_value_heads": 2},
    "one-kv-head": {"num_key_value_heads": 1},
    "every-head-its-own": {"num_key_value_heads": 4},
    "llama3-rope": {"rope_parameters": LLAMA3},
    "tied": {"tie_word_embeddings": True},
    "llama3-rope-tied-wide-heads": {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16},
    "another-eps": {"rms_norm_eps": 1e-2},
}
TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(4))


def saved(folder: Path, shape: dict[str, Any], dtype: torch.dtype, randomise: Any) -> Any:
    """Return a random transformers model, saved to ``folder`` by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{"rope_parameters": PLAIN_ROPE, "tie_word_embeddings": False, **shape})
    model = LlamaForCausalLM(config).to(dtype).eval()
    randomise(model, 1)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def our_logits(model: CausalLM, dense: Any) -> Tensor:
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), dense).hidden_TE)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, dtype: torch.dtype, shape: dict[str, Any], dense: Any, randomise: Any, tmp_path: Path
) -> None:
    theirs = saved(tmp_path, shape | VARIANTS[variant], dtype, randomise)
    ours = load_causal_lm(tmp_path, dtype=dtype, device=CPU)
    wanted = theirs(TOKENS[None]).logits[0]
    assert wanted.std() > 0.3, "logits must be large enough for 1e-5 to mean something"
    torch.testing.assert_close(our_logits(ours, dense), wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_aux_states_are_the_inputs_of_layers(shape: dict[str, Any], dense: Any, randomise: Any, tmp_path: Path) -> None:
    """The auxiliary states equal transformers' hidden_states[i], which is the input of layer i."""
    theirs = saved(tmp_path, shape, torch.float64, randomise)
    ours = load_causal_lm(tmp_path, dtype=torch.float64, device=CPU)
    states = theirs(TOKENS[None], output_hidden_states=True).hidden_states
    aux_states = ours(TOKENS, torch.arange(len(TOKENS)), dense, TargetStates((0, 2, 4))).aux_TA
    torch.testing.assert_close(aux_states, torch.cat([states[i][0] for i in (0, 2, 4)], dim=-1), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("variant", "field", "value"),
    [
        ("llama3-rope", "rope_parameters", PLAIN_ROPE | {"rope_theta": 500.0}),
        ("llama3-rope", "rope_parameters", LLAMA3 | {"factor": 4.0}),
        ("llama3-rope", "rope_parameters", LLAMA3 | {"high_freq_factor": 2.0}),
        ("grouped", "rms_norm_eps", 1e-2),
    ],
    ids=["no-scaling", "another-factor", "another-band", "another-eps"],
)
def test_wrongly_read_field_is_detected(
    variant: str, field: str, value: object, shape: dict[str, Any], dense: Any, randomise: Any, tmp_path: Path
) -> None:
    """The comparison detects a wrong value of a single field of config.json."""
    theirs = saved(tmp_path, shape | VARIANTS[variant], torch.float64, randomise)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    ours = load_causal_lm(tmp_path, dtype=torch.float64, device=CPU)
    assert (our_logits(ours, dense) - theirs(TOKENS[None]).logits[0]).abs().max() > 1e-3


def test_older_transformers_configs_are_equivalent(
    shape: dict[str, Any], randomise: Any, dense: Any, tmp_path: Path
) -> None:
    """A config with top-level rope_theta and rope_scaling, as before transformers 5, gives the same logits."""
    saved(tmp_path, shape | VARIANTS["llama3-rope"], torch.float64, randomise)
    wanted = our_logits(load_causal_lm(tmp_path, dtype=torch.float64, device=CPU), dense)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = config.pop("rope_parameters")
    old = config | {"rope_theta": nested.pop("rope_theta"), "rope_scaling": nested}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert torch.equal(our_logits(load_causal_lm(tmp_path, dtype=torch.float64, device=CPU), dense), wanted)
