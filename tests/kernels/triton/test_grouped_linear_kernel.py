"""Products of rows with the matrix of their expert: the interpreted kernels against their reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_kernels.grouped_linear import kernel, reference
from specdecode_kernels.quantised_linear.reference import KINDS, Kind, Quantised, dequantise, quantise
from specdecode_worker.models.arch import causal_lm_config, new_network
from specdecode_worker.models.causal_lm import Experts
from specdecode_worker.models.linear import QuantizedWeight
from specdecode_worker.models.optimize import fuse, quantise_target
from specdecode_worker.models.weights import load_causal_lm
from support.kernels.grouped_weights import with_groups
from support.kernels.interpreted import Plant, random
from support.small_llama4 import SHAPE, dense_chunks, write_quantized_llama4
from support.worker.quantized_folders import Rounding, int4, pack_quantized, scaled

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


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


STORES: dict[str, Callable[[Any], Quantised]] = {
    "int4": lambda matrices: quantise(matrices, "int4"),
    "int8": lambda matrices: quantise(matrices, "int8"),
    "fp8": lambda matrices: quantise(matrices, "fp8"),
    "int4 with zero points": lambda matrices: stored_in_groups("int4", matrices),
    "fp8 in groups": lambda matrices: stored_in_groups("fp8", matrices),
}


def stored_in_groups(kind: Kind, matrices: Tensor) -> Quantised:
    """Return other numbers of the size of the matrices and of their inputs."""
    weight = with_groups(kind, *matrices.shape, 32)
    return replace(weight, scale_NG=weight.scale_NG * float(matrices.std() / dequantise(weight).std()))


def matches(module: ModuleType, rows: int, experts: int, to: str, dtype: torch.dtype, store: str | None = None) -> bool:
    """Return whether the kernels equal the reference, for rows inside of wider tensors. ``store`` is in STORES."""
    size = 70
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
    gate_up: Tensor | Quantised = random(experts * 2 * 33, size, seed=1, dtype=dtype) / size**0.5
    down: Tensor | Quantised = random(experts * size, 33, seed=2, dtype=dtype) / 33**0.5
    if store is not None:
        gate_up, down = STORES[store](gate_up), STORES[store](down)
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


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(("rows", "dtype"), [(7, torch.float16), (70, torch.float32)], ids=str)
def test_product_with_quantised_matrices(rows: int, dtype: torch.dtype, name: str) -> None:
    assert matches(kernel, rows, 5, "any", dtype, store=name)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize(("rows", "to"), [(1, "any"), (40, "last"), (64, "equal")], ids=str)
def test_rows_and_experts_of_quantised_matrices(rows: int, to: str, kind: str) -> None:
    assert matches(kernel, rows, 4, to, torch.float16, store=kind)


def test_a_row_without_numbers_takes_no_place_of_another() -> None:
    logits = routed(20, 5)
    logits[7] = torch.nan
    assert sorted(kernel.group(logits).order_T.tolist()) == list(range(20))


@pytest.mark.parametrize("to", ["any", "last"])
def test_more_rows_than_one_grouping_pass_planted(to: str) -> None:
    assert matches(kernel, 200, 6, to, torch.float32)


@pytest.mark.parametrize("rows", [4096, 8192])
def test_groups_of_long_prompts_planted(rows: int) -> None:
    logits = routed(rows, 16)
    wanted, actual = reference.group(logits), kernel.group(logits)
    assert torch.equal(actual.order_T, wanted.order_T)
    assert torch.equal(actual.tiles_M3, wanted.tiles_M3)


@pytest.mark.parametrize("name", [None, "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_rows_are_independent_up_to_64_planted(dtype: torch.dtype, name: str | None) -> None:
    """A row keeps its bits with other rows before it and none behind; see test_small_linear_kernel.py for its place."""
    logits, x = routed(64, 4, dtype=dtype), random(64, 70, seed=0, dtype=dtype)
    plain = random(4 * 66, 70, seed=1, dtype=dtype)
    weight = plain if name is None else STORES[name](plain)
    together = kernel.grouped_linear(x, weight, kernel.group(logits), scored=True, gated=True)
    for row in (0, 5, 17, 40, 63):
        others = torch.cat([random(row, 70, seed=3 + row, dtype=dtype), x[row : row + 1]])
        groups = kernel.group(logits[: row + 1])
        assert torch.equal(kernel.grouped_linear(others, weight, groups, scored=True, gated=True)[row], together[row])


def test_no_rows() -> None:
    groups = kernel.group(torch.zeros(0, 4))
    assert kernel.grouped_linear(torch.zeros(0, 8), torch.zeros(24, 8), groups).shape == (0, 6)


BUGS: dict[str, tuple[str, str, str | None]] = {
    "carry": ("place_X += tl.sum(one_TX, 0)", "place_X += 0", None),
    "choice": (
        "tl.where(logit_TX == top_T[:, None], x[None, :], experts), 1)",
        "x[None, :] + 0 * logit_TX.to(tl.int32), 1)",
        None,
    ),
    "score": ("x = (x.to(tl.float32) * score[:, None]).to(x.dtype)", "x = x", None),
    "halves": ("expert.to(tl.int64) * halves", "expert.to(tl.int64) * 1", None),
    "end of the expert": ("real = place < tl.load(tile_3 + 2)", "real = place < tl.load(tile_3 + 1) + 1", None),
    "score of int4": ("acc_NT *= tl.load(score_T + t,", "acc_NT *= 1 + 0 * tl.load(score_T + t,", "int4"),
    "gate beside up of int4": ("i // halves + i % halves * outputs", "i", "int4"),
    "halves of int4": ("expert.to(tl.int64) * halves * outputs", "expert.to(tl.int64) * outputs", "int4"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_detected(bug: str, plant: Plant) -> None:
    old, new, store = BUGS[bug]
    faulty = plant(kernel, old, new)
    assert not all(matches(faulty, rows, 5, "any", torch.float32, store=store) for rows in (40, 100))


@pytest.mark.slow
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_stacked_experts_of_a_layer(kind: Kind | None) -> None:
    """The layer gives the same result after its experts are stacked, for one row and for many."""
    config = causal_lm_config(SHAPE | {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 2})
    model = new_network(config).requires_grad_(False)
    quantise_target(model, kind, torch.device("cpu"), stored=True)
    layer: Any = model.model.layers[1].mlp
    x_TE = random(70, config.hidden_size, seed=3)
    wanted = [layer(x_TE[:1]), layer(x_TE)]
    fuse(model)
    assert isinstance(layer, Experts)
    assert layer.gate_up_proj is not None
    assert not hasattr(layer, "experts")
    for actual, one in zip((layer(x_TE[:1]), layer(x_TE)), wanted, strict=True):
        torch.testing.assert_close(actual, one, atol=2e-5, rtol=2e-5)


COPIES: dict[str, Rounding] = {
    "fp8 of rows": scaled("rows"),
    "int4": int4(partial(pack_quantized, symmetric=True), group=32),
    "int4 with zero points": int4(partial(pack_quantized, symmetric=False), group=32),
}


@pytest.mark.slow
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("name", COPIES)
def test_quantised_checkpoints_of_llama4(name: str, tmp_path: Path) -> None:
    """Matrices per expert, as compressed-tensors writes them, through the kernels as in fp32 without them."""
    write_quantized_llama4(tmp_path, COPIES[name], num_hidden_layers=2)
    cpu, tokens_T = torch.device("cpu"), torch.arange(9) * 7 % 97
    plain, stored = (
        load_causal_lm(tmp_path, dtype=torch.float32, device=cpu, stored=stored) for stored in (False, True)
    )
    fuse(stored)
    layer: Any = stored.model.layers[1].mlp
    assert isinstance(layer.gate_up_proj.stored, QuantizedWeight)
    actual, wanted = (
        model.logits(model(tokens_T, torch.arange(9), dense_chunks(model.config)).hidden_TE)
        for model in (stored, plain)
    )
    assert wanted.std() > 0.1
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
