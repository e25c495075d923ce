"""Fused product of few rows: the interpreted kernel against its reference, and rows against each other."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.small_linear import kernel, op, reference
from support.kernels.interpreted import Plant, random

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def matches(
    module: ModuleType,
    sizes: tuple[int, int, int],
    *,
    biased: bool = False,
    gated: bool = False,
    added: bool = False,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Return whether the kernel equals the reference, for rows inside of wider tensors."""
    rows, size, outputs = sizes
    wide = random(rows, size + 3, seed=0, dtype=dtype)
    wide[:, size:] = float("nan")
    x = wide[:, :size]
    weight = random(2 * outputs if gated else outputs, size, seed=1, dtype=dtype) / size**0.5
    bias = random(len(weight), seed=2, dtype=dtype) if biased else None
    residual = random(rows, outputs + 5, seed=4, dtype=dtype)[:, 5:] if added else None
    actual = module.small_linear(x, weight, bias, residual, gated=gated)
    wanted = reference.small_linear(x, weight, bias, residual_TN=residual, gated=gated)
    tolerance = TOLERANCE[dtype]
    return actual.shape == wanted.shape and torch.allclose(actual, wanted, atol=tolerance, rtol=tolerance)


SIZES = [(1, 1, 1), (1, 64, 32), (5, 100, 33), (16, 130, 70), (7, 17, 64), (17, 70, 40), (64, 130, 70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert matches(kernel, sizes, dtype=dtype)
    assert matches(kernel, sizes, biased=True, dtype=dtype)
    assert matches(kernel, sizes, added=True, biased=True, dtype=dtype)
    assert matches(kernel, sizes, gated=True, dtype=dtype)
    assert matches(kernel, sizes, gated=True, biased=True, added=True, dtype=dtype)


def rows_are_independent(module: ModuleType) -> bool:
    """Return whether rows keep their results, bit for bit, with other rows before them and none behind.

    A row keeps its place in the tile: on some processors the matrix product of numpy, which stands for ``tl.dot``
    here, sums in another order at another place.
    """
    x, weight = random(9, 96, seed=0), random(40, 96, seed=1)
    together = module.small_linear(x, weight, None, None, gated=True)
    for row in range(len(x)):
        others = torch.cat([random(row, 96, seed=3 + row), x[row : row + 1]])
        if not torch.equal(module.small_linear(others, weight, None, None, gated=True)[row], together[row]):
            return False
    return True


def test_the_result_of_a_row_does_not_depend_on_other_rows(plant: Plant) -> None:
    assert rows_are_independent(kernel)
    assert not rows_are_independent(plant(kernel, "* up_TN\n", "* up_TN + tl.sum(up_TN, 0)[None, :]\n"))


def test_no_rows() -> None:
    assert kernel.small_linear(random(0, 8, seed=0), random(6, 8, seed=1), None, None, gated=True).shape == (0, 3)


@pytest.mark.usefixtures("on_kernels")
def test_products_that_the_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "LEAST_OUTPUTS", 4)
    x, weight = random(3, 8, seed=0), random(4, 8, seed=1)
    assert op.fits(x, weight)
    assert not op.fits(random(65, 8, seed=0), weight)
    assert not op.fits(x, weight[:3])
    assert op.fits(x.half(), weight.half())
    assert not op.fits(x.double(), weight.double())
    assert not op.fits(x, weight.bfloat16())
    assert torch.allclose(op.small_linear(x, weight), reference.small_linear(x, weight), atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "large"), [((8, 6), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_gpus_with_little_shared_memory_take_small_tiles(
    capability: tuple[int, int], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has 227 KiB of a Hopper and of a B200, but 99 KiB of an L40S and of the newer RTX PRO 6000."""
    monkeypatch.setattr(dispatch, "_capability", lambda _: capability)
    assert dispatch.is_hopper(cast(Tensor, SimpleNamespace(is_cuda=True, device="cuda:0"))) == large


ALL = {"biased": True, "gated": True, "added": True}
BUGS = {
    "the gate is the second half": ("weight_NK + outputs.to(tl.int64) * size", "weight_NK"),
    "the bias of the gate twice": ("bias_N + outputs + n", "bias_N + n"),
    "no residual": ("acc_TN += tl.load(place", "acc_TN += 0 * tl.load(place"),
    "inputs after the last are read": ("inside = inside & (column < size)[None, :]\n        x", "x"),
    "the last output is lost": ("(n < outputs)[None, :]", "(n < outputs - 1)[None, :]"),
    "no sigmoid": ("(1.0 + tl.exp(-acc_TN))", "1.0"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    sizes = (5, 70, 33)
    assert matches(kernel, sizes, **ALL)
    assert not matches(plant(kernel, *BUGS[bug]), sizes, **ALL)
