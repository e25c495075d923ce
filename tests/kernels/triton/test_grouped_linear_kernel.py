"""Products of rows with the matrix of their expert: the interpreted kernels against their reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdecode_kernels.grouped_linear import kernel, reference
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.layers import MLP, Experts
from support.small_llama4 import SHAPE

pytestmark = pytest.mark.usefixtures("poisoned")

Plant = Callable[[ModuleType, str, str], ModuleType]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(rows: int, experts: int, to: str = "any", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return logits of rows: to any expert but the second, all to the last, or two equal largest ones."""
    logits = random(rows, experts, seed=9, dtype=dtype)
    if to == "last":
        logits[:, -1] += 9
    elif to == "equal":
        logits[:, [0, experts - 1]] = 9.0
    elif experts > 1:
        logits[:, 1] = -9.0
    return logits


def matches(module: ModuleType, rows: int, experts: int, to: str, dtype: torch.dtype, size: int = 70) -> bool:
    """Return whether the kernels equal the reference, for rows inside of wider tensors."""
    logits = routed(rows, experts, to, dtype)
    wanted, actual = reference.group(logits), module.group(logits)
    if not (torch.equal(actual.order_T, wanted.order_T) and torch.equal(actual.tiles_M3, wanted.tiles_M3)):
        return False
    tolerance = TOLERANCE[dtype]
    if not torch.allclose(actual.score_T, wanted.score_T, atol=tolerance):
        return False
    wide = random(rows, size + 3, seed=0, dtype=dtype)
    wide[:, size:] = float("nan")
    x = wide[:, :size]
    gate_up = random(experts, 2 * 33, size, seed=1, dtype=dtype) / size**0.5
    down = random(experts, size, 33, seed=2, dtype=dtype) / 33**0.5
    residual = random(rows, size + 5, seed=4, dtype=dtype)[:, 5:]
    inner = module.grouped_linear(x, gate_up, actual, scored=True, gated=True)
    wanted_inner = reference.grouped_linear(x, gate_up, wanted, scored=True, gated=True)
    out = module.grouped_linear(wanted_inner, down, actual, residual)
    wanted_out = reference.grouped_linear(wanted_inner, down, wanted, residual_TN=residual)
    return all(
        one.shape == other.shape and torch.allclose(one, other, atol=tolerance, rtol=tolerance)
        for one, other in ((inner, wanted_inner), (out, wanted_out))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("to", ["any", "last", "equal"])
@pytest.mark.parametrize(("rows", "experts"), [(1, 4), (7, 1), (40, 5), (64, 16)], ids=str)
def test_product(rows: int, experts: int, to: str, dtype: torch.dtype) -> None:
    """The second expert has no row, or the last one has all, or equal logits choose the first."""
    assert matches(kernel, rows, experts, to, dtype)


@pytest.mark.parametrize("to", ["any", "last"])
def test_more_rows_than_one_grouping_pass_planted(to: str) -> None:
    assert matches(kernel, 200, 6, to, torch.float32)


@pytest.mark.parametrize("rows", [4096, 8192])
def test_groups_of_long_prompts_planted(rows: int) -> None:
    logits = routed(rows, 16)
    wanted, actual = reference.group(logits), kernel.group(logits)
    assert torch.equal(actual.order_T, wanted.order_T)
    assert torch.equal(actual.tiles_M3, wanted.tiles_M3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_rows_are_independent_up_to_64_planted(dtype: torch.dtype) -> None:
    """A row keeps its bits with other rows before it and none behind; see test_small_linear_kernel.py for its place."""
    logits, x = routed(64, 4, dtype=dtype), random(64, 70, seed=0, dtype=dtype)
    weight = random(4, 66, 70, seed=1, dtype=dtype)
    together = kernel.grouped_linear(x, weight, kernel.group(logits), scored=True, gated=True)
    for row in (0, 5, 17, 40, 63):
        others = torch.cat([random(row, 70, seed=3 + row, dtype=dtype), x[row : row + 1]])
        groups = kernel.group(logits[: row + 1])
        assert torch.equal(kernel.grouped_linear(others, weight, groups, scored=True, gated=True)[row], together[row])


def test_no_rows() -> None:
    groups = kernel.group(torch.zeros(0, 4))
    assert kernel.grouped_linear(torch.zeros(0, 8), torch.zeros(4, 6, 8), groups).shape == (0, 6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place_X += tl.sum(one_TX, 0)", "place_X += 0"),
        ("tl.where(logit_TX == top_T[:, None], x[None, :], experts), 1)", "x[None, :] + 0 * logit_TX.to(tl.int32), 1)"),
        ("x = (x.to(tl.float32) * score[:, None]).to(x.dtype)", "x = x"),
        ("expert.to(tl.int64) * halves", "expert.to(tl.int64) * 1"),
        ("real = place < tl.load(tile_3 + 2)", "real = place < tl.load(tile_3 + 1) + 1"),
    ],
    ids=["carry", "choice", "score", "halves", "end of the expert"],
)
def test_planted_bug_is_detected(old: str, new: str, plant: Plant) -> None:
    faulty = plant(kernel, old, new)
    assert not all(matches(faulty, rows, 5, "any", torch.float32) for rows in (40, 100))


@pytest.mark.usefixtures("on_kernels")
def test_stacked_experts_of_a_layer() -> None:
    """The layer gives the same result after its experts are stacked, for one row and for many."""
    config = causal_lm_config(SHAPE | {"architectures": ["Llama4ForCausalLM"]})
    layer = Experts(config, 4).requires_grad_(False)
    x_TE = random(70, config.hidden_size, seed=3)
    wanted = [layer(x_TE[:1]), layer(x_TE)]
    for mlp in (layer.shared_expert, *layer.experts):
        assert isinstance(mlp, MLP)
        mlp.join()
    layer.stack()
    assert layer.gate_up_XNE is not None
    for actual, one in zip((layer(x_TE[:1]), layer(x_TE)), wanted, strict=True):
        torch.testing.assert_close(actual, one, atol=2e-5, rtol=2e-5)
