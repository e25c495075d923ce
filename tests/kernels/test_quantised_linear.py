"""Quantised weights: the stored format, and the interpreted kernels against their reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear import kernel, reference
from specdecode_kernels.quantised_linear.reference import Kind, Quantised, dequantise, quantise, stored_bytes
from support.kernels.grouped_weights import with_groups
from support.kernels.interpreted import Plant, random

pytestmark = pytest.mark.usefixtures("poisoned")

KINDS = pytest.mark.parametrize("kind", reference.KINDS)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
SHAPES = [(1, 1), (7, 63), (33, 100), (40, 256), (16, 320)]
"""(outputs, inputs)"""


def agrees(
    module: ModuleType, kind: Kind, rows: int, outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype
) -> bool:
    """Return whether a kernel agrees with the reference on rows of a wider tensor that is NaN elsewhere."""
    weight = quantise(random(outputs, inputs) * torch.arange(1, outputs + 1)[:, None], kind)
    x = torch.full((rows, inputs + 9), torch.nan, dtype=dtype)[:, 4 : inputs + 4]
    x.copy_(random(rows, inputs, seed=1) / inputs)
    b = random(outputs, seed=2, dtype=dtype) if bias else None
    actual, wanted = module.linear(x, weight, b), reference.linear(x, weight, b)
    assert actual.dtype == dtype
    return torch.allclose(actual, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@KINDS
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 64, 130])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_kernel(kind: Kind, rows: int, outputs: int, inputs: int) -> None:
    assert agrees(kernel, kind, rows, outputs, inputs, bias=rows % 2 == 0, dtype=torch.float32)
    if rows in (1, 17):
        assert agrees(kernel, kind, rows, outputs, inputs, bias=True, dtype=torch.float16)


ALL_LEVELS = torch.arange(256, dtype=torch.uint8)
"""Bits of every fp8 number; 0x7F and 0xFF are not numbers, which no weight is."""


def fp8_from_bits_is_exact(module: ModuleType, rows: int, dtype: torch.dtype) -> bool:
    """Return whether products with all fp8 levels are right on a GPU without fp8.

    Each row of x picks one column, so each result is one level.
    """
    levels = ALL_LEVELS[(ALL_LEVELS & 0x7F) != 0x7F].view(torch.float8_e4m3fn).view(2, 127)
    weight = Quantised("fp8", levels, torch.ones(2, 1), 127, 127)
    picked = [torch.eye(127, dtype=dtype)[at : at + rows] for at in range(0, 127, rows)]
    actual = torch.cat([module.linear(x, weight) for x in picked])
    return torch.equal(actual.float(), levels.float().T)


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (32, torch.float32), (32, torch.float16)])
def test_fp8_from_bits(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_fp8", lambda _: False)
    assert fp8_from_bits_is_exact(kernel, rows, dtype)


def test_a_bug_planted_in_fp8_from_bits_is_detected(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_fp8", lambda _: False)
    assert not fp8_from_bits_is_exact(plant(kernel, "(bits & 0x80) << 24", "(bits & 0x80) << 23"), 32, torch.float32)


BUGS = [
    ("int4", 1, "first + b < columns", "first + b < columns - 1"),
    ("int4", 1, "at_high = first + BLOCK_B + b", "at_high = first + b"),
    ("int4", 3, "low, high = first + b, first + BLOCK_B + b", "high, low = first + b, first + BLOCK_B + b"),
    ("int4", 3, "at_N = place_N * groups + group", "at_N = place_N * groups"),
    ("int4", 3, "acc_NT += part_NT * scale_N[:, None]", "acc_NT = part_NT * scale_N[:, None]"),
    ("int4", 1, "tl.full((real.shape[0], 1), 8, tl.int32)", "tl.full((real.shape[0], 1), 7, tl.int32)"),
    ("int8", 1, "inside = k < columns", "inside = k < columns + 1"),
    ("int8", 3, "out_TN + at_NT, acc_NT", "out_TN + at_NT + 1, acc_NT"),
    ("fp8", 3, "acc_NT *= tl.load(scale_NG + place_N", "acc_NT *= tl.load(scale_NG + 0 * place_N"),
    (
        "fp8",
        3,
        "inside_T[None, :] & inside[:, None]",
        "inside[:, None] & (tl.cumsum(inside_T, 0) > 1)[None, :]",
    ),
    ("int8", 66, "t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)", "t = tl.arange(0, BLOCK_T)"),
]


@pytest.mark.parametrize(("kind", "rows", "old", "new"), BUGS)
def test_planted_bugs_are_detected(kind: Kind, rows: int, old: str, new: str, plant: Plant) -> None:
    assert not agrees(plant(kernel, old, new), kind, rows, 33, 100 + 128, bias=True, dtype=torch.float32)


def agrees_in_groups(module: ModuleType, kind: Kind, rows: int) -> bool:
    """Return whether a kernel agrees with the reference on scales, and zero points, of groups of 32 inputs."""
    weight, x = with_groups(kind, 33, 200, 32), random(rows, 200, seed=1)
    return torch.allclose(module.linear(x, weight), reference.linear(x, weight), atol=1e-3, rtol=1e-5)


@KINDS
@pytest.mark.parametrize("rows", [1, 17])
def test_kernel_with_groups_and_zero_points(kind: Kind, rows: int) -> None:
    assert agrees_in_groups(kernel, kind, rows)


BUGS_OF_GROUPS = [
    ("int4", 1, "tl.load(zero_NG + at_N", "tl.load(zero_NG + at_N // 2 * 2"),
    ("int4", 3, "zero_N1 = _zeros(zero_NG, at_N, real, ZERO)", "zero_N1 = _zeros(zero_NG, at_N, real, False)"),
    ("int8", 1, "part_NB *= tl.load(scale_NG + at_N", "part_NB *= tl.load(scale_NG + n"),
    ("fp8", 3, "acc_NT += part_NT * tl.load(scale_NG + at_N", "acc_NT += part_NT * tl.load(scale_NG + place_N"),
]


@pytest.mark.parametrize(("kind", "rows", "old", "new"), BUGS_OF_GROUPS)
def test_bugs_planted_in_groups_are_detected(kind: Kind, rows: int, old: str, new: str, plant: Plant) -> None:
    assert not agrees_in_groups(plant(kernel, old, new), kind, rows)


@pytest.mark.parametrize(("kind", "most"), [("int4", 0.099), ("int8", 0.008), ("fp8", 0.03)])
def test_quantisation_error_is_bounded(kind: Kind, most: float) -> None:
    """The root mean square error of normal weights, relative to their root mean square, stays below ``most``."""
    weight = random(64, 512)
    wrong = dequantise(quantise(weight, kind)) - weight
    assert wrong.square().mean().sqrt() < most


@KINDS
def test_zeros_and_outliers(kind: Kind) -> None:
    weight = random(4, 200)
    weight[0] = 0
    weight[1, 7] = 1e4
    weight[2] *= 1e-30
    back = dequantise(quantise(weight, kind))
    assert back.isfinite().all()
    assert not back[0].any()
    assert torch.allclose(back[1, 7], weight[1, 7], rtol=5e-3)


@pytest.mark.parametrize("sign", [-1, 1])
def test_largest_weight_of_a_group_is_exact(sign: int) -> None:
    weight = torch.zeros(1, 128)
    weight[0, 5] = sign * 8
    assert torch.equal(dequantise(quantise(weight, "int4")), weight)


@KINDS
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_stored_bytes_predicts_the_size(kind: Kind, outputs: int, inputs: int) -> None:
    assert quantise(random(outputs, inputs), kind).nbytes == stored_bytes(outputs, inputs, kind)


@KINDS
def test_joining_rows_commutes_with_quantisation(kind: Kind) -> None:
    one, two = random(5, 128), random(3, 128, seed=1)
    apart = [dequantise(quantise(part, kind)) for part in (one, two)]
    assert torch.equal(dequantise(quantise(torch.cat((one, two)), kind)), torch.cat(apart))
