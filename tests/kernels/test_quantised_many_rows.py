"""Products of many rows with quantised weights: the split of rows into fp8, fp8 products, and dequantised matrices."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels import dispatch, timings
from specdecode_kernels.quantised_linear import dequantise_kernel, kernel, op, reference, scaled_kernel
from specdecode_kernels.quantised_linear.choice import FEW_ROWS, MOST_TILE_ROWS, choose
from specdecode_kernels.quantised_linear.reference import LOW_SCALE, Kind, dequantise, quantise
from specdecode_kernels.timings import Case, Timings
from support.kernels.grouped_weights import with_groups
from support.kernels.interpreted import Plant, random

KINDS = pytest.mark.parametrize("kind", reference.KINDS)


def ugly_rows(columns: int) -> Tensor:
    """Return bf16 rows of ordinary, tiny and huge numbers, of zeros, and of numbers of very different sizes."""
    rows = random(7, columns)
    rows[1] *= 1e-30
    rows[2] *= 1e30
    rows[3] = 0
    rows[4] *= torch.logspace(-6, 3, columns)
    rows[5] = rows[5].sign() * 1.9921875  # all bits of a bf16 number
    rows[6] *= 1e-42
    return rows.bfloat16()


@pytest.mark.parametrize("columns", [1, 100, 1500])
def test_split_loses_nothing(columns: int) -> None:
    x = ugly_rows(columns)
    high, low, scale = reference.split(x)
    joined = scale.double()[:, None] * (high.double() + low.double() / LOW_SCALE)
    wrong = (joined - x.double()).abs()[:6]
    most = x.double().abs().amax(1, keepdim=True)[:6]
    assert (wrong <= most * 2.0**-22).all()
    assert not wrong[x.double().abs()[:6] >= most * 2.0**-14].any()


def has_equal_split(module: ModuleType, x: Tensor) -> bool:
    """Return whether a kernel splits rows into the same bits as the reference."""
    high, low, scale = reference.split(x)
    parts, scales, one = module.split(x)
    wanted = torch.cat((high, low))
    return torch.equal(parts.float(), wanted.float()) and torch.equal(scales, scale) and one.item() == 1


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("columns", [1, 100, 1024, 1500])
def test_kernel_splits_as_the_reference(columns: int) -> None:
    wider = torch.full((7, columns + 5), torch.nan, dtype=torch.bfloat16)[:, 2 : columns + 2]
    wider.copy_(ugly_rows(columns))
    assert has_equal_split(scaled_kernel, wider)


def scaled_agrees(module: ModuleType, rows: int, outputs: int, inputs: int, *, bias: bool) -> bool:
    """Return whether fp8 products of bf16 rows are exact, but for the rounding of sums in fp32."""
    weight = quantise(random(outputs, inputs) * torch.arange(1, outputs + 1)[:, None], "fp8")
    x = (random(rows, inputs, seed=1) * torch.logspace(-3, 3, rows)[:, None]).bfloat16()
    b = random(outputs, seed=2, dtype=torch.bfloat16) if bias else None
    exact = F.linear(x.double(), dequantise(weight, torch.float64), None if b is None else b.double())
    out = torch.full((rows, outputs), torch.nan)
    module.multiply(x, weight, b, out)
    room = 3e-6 * x.double().abs() @ dequantise(weight, torch.float64).abs().t()
    return bool(((out - exact).abs() <= room + 1e-6 * exact.abs()).all())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(65, 16, 16), (5, 1040, 48), (7, 32, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_products_keep_all_bits_of_the_rows(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    assert scaled_agrees(scaled_kernel, rows, outputs, inputs, bias=bias)


def test_rows_are_multiplied_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = quantise(random(32, 64), "fp8"), random(25, 64, seed=1, dtype=torch.bfloat16)
    together = scaled_kernel.linear(x, weight)
    monkeypatch.setattr(scaled_kernel, "SUMS_BYTES", 8 * 32 * 10)
    assert torch.equal(scaled_kernel.linear(x, weight), together)
    # the interpreter cuts bf16 results off instead of rounding them
    assert torch.allclose(together.float(), reference.linear(x, weight).float(), rtol=2.0**-6, atol=1e-6)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    weight, x = quantise(random(32, 64), "fp8"), random(66, 64, dtype=torch.bfloat16)
    x[3, 5], x[9, 0] = torch.nan, torch.inf
    out = scaled_kernel.linear(x, weight)
    assert not out[[3, 9]].isfinite().any()
    assert out[[row for row in range(66) if row not in (3, 9)]].isfinite().all()


BUGS = [
    ("+ 0x7FFFF + ((size >> 20) & 1)", "+ 0x7FFFF"),
    ("(bits >> 24) & 0x80", "(bits >> 23) & 0x80"),
    ("(x_K - _levels(high_K, tl.float32, True)) * LOW", "x_K * 0"),
    ("low_N * (1 / LOW)", "low_N"),
    ("(t + rows) * outputs", "t * outputs"),
    ("(exponent + 120) << 23", "(exponent + 121) << 23"),
    ("tl.load(scale_N + n, mask=real, other=0.0)", "tl.load(scale_N)"),
    (
        "start + k < columns, other=0.0).to(tl.float32)\n        most_K",
        "k < 1, other=0.0).to(tl.float32)\n        most_K",
    ),
]


@pytest.mark.parametrize(("old", "new"), BUGS)
def test_bugs_planted_in_fp8_products_are_detected(old: str, new: str, plant: Plant) -> None:
    planted = plant(scaled_kernel, old, new)
    x = ugly_rows(1500)
    assert not (has_equal_split(planted, x) and scaled_agrees(planted, 70, 48, 64, bias=False))


@pytest.mark.usefixtures("poisoned")
@KINDS
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 63), (33, 100), (40, 256), (16, 1320)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dequantised_matrix_is_that_of_the_reference(kind: Kind, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = quantise(random(outputs, inputs), kind)
    assert torch.equal(dequantise_kernel.dequantise(weight, dtype), dequantise(weight, dtype))


@pytest.mark.usefixtures("poisoned")
@KINDS
@pytest.mark.parametrize("group", [32, 128])
def test_dequantised_groups_are_those_of_the_reference(kind: Kind, group: int) -> None:
    weight = with_groups(kind, 33, 1320, group)
    assert torch.equal(dequantise_kernel.dequantise(weight, torch.float32), dequantise(weight))


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("rows", [3, MOST_TILE_ROWS + 1])
def test_columns_in_another_order_multiply_their_inputs(rows: int) -> None:
    """Act-order: the inputs are put in the order of the stored columns; the matrix itself is in the usual order."""
    x, weight = random(rows, 256, seed=1), with_groups("int4", 16, 256, 32)
    ordered = replace(weight, order_K=torch.randperm(256, generator=torch.Generator().manual_seed(6)))
    assert torch.equal(dequantise(ordered)[:, ordered.order_K], dequantise(weight))
    torch.testing.assert_close(op.linear(x, ordered), F.linear(x, dequantise(ordered)), atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("on_kernels")
def test_fp8_with_groups_is_not_multiplied_as_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes one scale a row; blocks have more."""
    monkeypatch.setattr(dispatch, "has_fp8", lambda _: True)
    monkeypatch.setattr(scaled_kernel, "linear", lambda *_: pytest.fail("it ignores the groups"))
    monkeypatch.setattr(kernel, "linear", reference.linear)
    x, weight = random(FEW_ROWS + 1, 256, dtype=torch.bfloat16), with_groups("fp8", 16, 256, 128)
    assert torch.equal(op.linear(x, weight), reference.linear(x, weight))


def test_fp8_is_dequantised_from_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_fp8", lambda _: False)
    weight = quantise(random(33, 100), "fp8")
    assert torch.equal(dequantise_kernel.dequantise(weight, torch.float32), dequantise(weight))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [  # none writes outside of the matrix, which would end the process
        ("int4", "row_N * groups + group if", "row_N * groups if"),
        ("int4", "(low < columns)", "(low < columns - 1)"),
        ("fp8", "tl.load(scale_NG + at_N", "tl.load(scale_NG + 0 * at_N"),
        ("int8", "group * BLOCK_B + b\n", "b\n"),
    ],
)
def test_bugs_planted_in_dequantisation_are_detected(kind: Kind, old: str, new: str, plant: Plant) -> None:
    weight = quantise(random(33, 1320), kind)
    planted = plant(dequantise_kernel, old, new)
    assert not torch.equal(planted.dequantise(weight, torch.float32), dequantise(weight))


CHOICES = [
    ("fp8", (48, 64), FEW_ROWS, torch.bfloat16, True, "tile"),
    ("fp8", (48, 64), FEW_ROWS + 1, torch.bfloat16, True, "scaled"),
    ("fp8", (48, 64), 5000, torch.bfloat16, True, "scaled"),
    ("fp8", (48, 64), FEW_ROWS + 1, torch.bfloat16, False, "tile"),
    ("fp8", (48, 64), FEW_ROWS + 1, torch.float16, True, "tile"),
    ("fp8", (48, 64), 5000, torch.float32, True, "dequantised"),
    ("fp8", (40, 64), 100, torch.bfloat16, True, "tile"),
    ("fp8", (48, 40), 100, torch.bfloat16, True, "tile"),
    ("int8", (48, 64), MOST_TILE_ROWS, torch.bfloat16, True, "tile"),
    ("int4", (48, 64), MOST_TILE_ROWS + 1, torch.bfloat16, True, "dequantised"),
]


@pytest.mark.parametrize(("kind", "size", "rows", "dtype", "fp8", "way"), CHOICES)
def test_choice_without_timings(
    kind: Kind, size: tuple[int, int], rows: int, dtype: torch.dtype, fp8: bool, way: str
) -> None:
    """Products as fp8 need sizes that are multiples of 16."""
    assert choose(kind, *size, rows, dtype, fp8=fp8) == way


def test_choice_follows_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        Case(("fp8", 48, 64), 512, {"scaled": 5.0, "tile": 7.0, "dequantised": 4.0}),
        Case(("fp8", 48, 64), 128, {"scaled": 5.0, "tile": 3.0, "dequantised": 9.0}),
    )
    monkeypatch.setattr(timings, "_current", Timings("a GPU", cases))
    chosen = [choose("fp8", 48, 64, rows, torch.bfloat16, fp8=True) for rows in (64, 65, 128, 129, 512, 2048)]
    assert chosen == ["tile", "tile", "tile", "dequantised", "dequantised", "dequantised"]
    # what the GPU lacks is not chosen, and other matrices and types follow the rules
    assert choose("fp8", 48, 64, 100, torch.bfloat16, fp8=False) == "tile"
    assert choose("fp8", 32, 64, 100, torch.bfloat16, fp8=True) == "scaled"
    assert choose("fp8", 48, 64, 200, torch.float32, fp8=True) == "tile"


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("rows", [FEW_ROWS, MOST_TILE_ROWS + 1])
def test_double_precision_takes_the_reference(rows: int) -> None:
    """The kernels would round; triton/test_launches.py has the ways of the other types."""
    x, weight = random(rows, 32, dtype=torch.float64), quantise(random(16, 32), "int8")
    assert torch.equal(op.linear(x, weight), reference.linear(x, weight))
