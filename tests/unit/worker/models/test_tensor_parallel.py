"""Tests that the parts of a split target together compute the whole, for each family.

The ranks are threads. In a rehearsal, a rank runs alone and leaves collectives out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.quantised_linear.reference import Kind
from specdecode_worker.models import collectives, linear
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import split_config
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.linear import Linear, QuantizedWeight, Shard
from specdecode_worker.models.optimize import fuse, quantise_target
from specdecode_worker.models.tensor_parallel import load_shard
from specdecode_worker.models.weights import load_causal_lm
from support.worker.dense_attention import dense
from support.worker.small_folders import write_random_target
from support.worker.thread_ranks import ThreadRanks

CPU = torch.device("cpu")


TOKENS_T, POSITIONS_T = torch.arange(9) * 7 % 97, torch.arange(9)
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
BIASES = {"attention_bias": True, "mlp_bias": True}


def outputs(network: CausalLM) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits."""
    hidden_TE = network(TOKENS_T, POSITIONS_T, dense).hidden_TE
    return hidden_TE, network.logits(hidden_TE)


def whole_outputs(folder: Path) -> tuple[Tensor, Tensor]:
    return outputs(load_causal_lm(folder, dtype=torch.float64, device=CPU))


def outputs_of_ranks(
    folder: Path, size: int, monkeypatch: Any, change: Callable[[CausalLM], object] = lambda part: None
) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of each rank, whose part is changed before."""
    ranks = ThreadRanks(size)
    monkeypatch.setattr(collectives, "dist", ranks)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        part = load_shard(folder, Shard(rank, size), dtype=torch.float64, device=CPU)
        change(part)
        return outputs(part)

    return ranks.run(work)


@pytest.mark.parametrize("changed", [{}, BIASES, {"tie_word_embeddings": True}, QWEN3], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_together_compute_the_whole(
    tmp_path: Path, shape: dict[str, Any], monkeypatch: Any, changed: Any, size: int
) -> None:
    folder = write_random_target(tmp_path, shape | {"num_key_value_heads": 4} | changed)
    expected, expected_logits = whole_outputs(folder)
    (first, logits), *others = outputs_of_ranks(folder, size, monkeypatch)
    torch.testing.assert_close(first, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9)
    for hidden, none in others:
        torch.testing.assert_close(hidden, expected, rtol=1e-9, atol=1e-9)
        assert none.shape == (9, 0)


@pytest.mark.parametrize("few", [False, True], ids=["many rows", "few rows"])
@pytest.mark.parametrize("changed", [{}, BIASES], ids=["plain", "biases"])
def test_fused_layers_of_parts_compute_the_whole(
    tmp_path: Path, shape: dict[str, Any], monkeypatch: Any, changed: Any, few: bool
) -> None:
    """The first device alone adds the residual, so two devices add it once."""
    folder = write_random_target(tmp_path, shape | changed)
    expected, _ = whole_outputs(folder)
    monkeypatch.setattr(linear, "fits", lambda x, weight: few)
    monkeypatch.setattr(Linear, "_overwrites", lambda self, x, inner: self.bias is None)  # as on a GPU
    for hidden, _ in outputs_of_ranks(folder, 2, monkeypatch, fuse):
        torch.testing.assert_close(hidden, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_parts_compute_what_their_rounded_weights_do(
    tmp_path: Path, shape: dict[str, Any], monkeypatch: Any, kind: Kind
) -> None:
    """Stored in few bits or rounded to them, parts compute the same; it is near what the whole target computes."""
    folder = write_random_target(tmp_path, shape | BIASES)
    _, plain = whole_outputs(folder)

    def quantise(part: CausalLM, *, stored: bool) -> None:
        quantise_target(part, kind, CPU, stored=stored)
        fuse(part)
        assert any(isinstance(module, QuantizedWeight) for module in part.modules()) == stored

    stored, rounded = (
        outputs_of_ranks(folder, 2, monkeypatch, partial(quantise, stored=stored))[0][1] for stored in (True, False)
    )
    torch.testing.assert_close(stored, rounded, rtol=1e-9, atol=1e-9)
    assert 1e-4 < (stored - plain).abs().mean() / plain.abs().mean() < 0.1


@given(st.integers(1, 500), st.integers(1, 16))
def test_every_row_is_on_one_device(count: int, size: int) -> None:
    rows = [row for rank in range(size) for row in range(count)[Shard(rank, size).part(count)]]
    assert rows == list(range(count))


def test_a_shard_refuses_unsplittable_heads_and_missing_weights(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = write_random_target(tmp_path, shape)
    with pytest.raises(ConfigMismatch, match="num_attention_heads 4 cannot be split over tensor_parallel_size 3"):
        load_shard(folder, Shard(0, 3), dtype=torch.float64, device=CPU)
    config = causal_lm_config(shape | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8})
    with pytest.raises(ConfigMismatch, match="num_key_value_heads 4 cannot be split over tensor_parallel_size 6"):
        split_config(config, 6)
    (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 6}))
    with pytest.raises(WeightMismatch, match=r"model\.layers\.5.* is missing"):
        load_shard(folder, Shard(0, 2), dtype=torch.float64, device=CPU)


def test_a_rehearsal_calls_no_other_rank() -> None:
    """There is no process group here, so a collective that is not left out raises."""
    tensor = torch.arange(6.0).view(2, 3)
    with collectives.rehearsal():
        for collective in (collectives.all_reduce, collectives.broadcast, collectives.send_to_first):
            collective(tensor)
        gathered = collectives.gather(tensor, 4)
    assert torch.equal(gathered, torch.stack([tensor] * 4)), "the shape is right, and all values are finite"
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))
    with pytest.raises(ValueError, match="process group"):
        collectives.all_reduce(tensor)


def test_a_rehearsal_that_fails_is_over() -> None:
    with pytest.raises(RuntimeError, match="no memory"), collectives.rehearsal():
        raise RuntimeError("no memory")
    with pytest.raises(ValueError, match="process group"):
        collectives.broadcast(torch.zeros(1))
