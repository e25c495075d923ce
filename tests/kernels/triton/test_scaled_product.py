"""Calls of `torch._scaled_mm` for fp8 weights, on fake CUDA tensors: its checks of sizes, strides and scales are run.

It runs in a process of its own, because Triton either compiles or interprets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.kernels.interpreted import run_compiling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "gpu"
TRACE = """
import json
import torch
from launch_counter import counting, fake_gpu
from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear.op import linear
from specdecode_kernels.quantised_linear.reference import Quantised

def launches(rows, outputs, inputs, bias):
    weight = Quantised(
        "fp8",
        torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="cuda"),
        torch.empty(outputs, 1, device="cuda"),
        inputs,
        inputs,
    )
    # rows of a wider tensor, as attention and norms return them
    x = torch.empty(rows, inputs + 16, dtype=torch.bfloat16, device="cuda")[:, :inputs]
    b = torch.empty(outputs, dtype=torch.bfloat16, device="cuda") if bias else None
    with counting() as counted:
        out = linear(x, weight, b)
    assert out.shape == (rows, outputs) and out.dtype == x.dtype and out.is_contiguous()
    return dict(counted)

found = {}
for fp8 in (True, False):
    dispatch.has_fp8 = lambda _: fp8
    for case in CASES:
        with fake_gpu():
            found[str((*case, fp8))] = launches(*case)
print(json.dumps(found))
"""
CASES = [(65, 4096, 14336, False), (100, 28672, 4096, True), (4096, 28672, 4096, False), (65, 4100, 4096, False)]
"""(rows, outputs, inputs, with a bias)"""
SCALED = {"split": 1, "_scaled_mm": 1, "merge": 1}
DEQUANTISED = {"dequantise": 1, "mm": 1}


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    code = TRACE.replace("CASES", repr(CASES))
    launches: dict[str, Any] = json.loads(run_compiling("-c", code, paths=(str(BENCHMARKS),)))
    return launches


@pytest.mark.parametrize("case", CASES[:2])
def test_many_rows_are_three_launches(case: tuple[int, int, int, bool], traced: dict[str, Any]) -> None:
    assert traced[str((*case, True))] == SCALED


def test_sums_of_very_many_rows_are_bounded(traced: dict[str, Any]) -> None:
    """4,096 rows of 28,672 outputs would need 940 MB for sums; they are multiplied in four calls."""
    assert traced[str((*CASES[2], True))] == {name: 4 * count for name, count in SCALED.items()}


def test_without_fp8_or_with_other_sizes_the_tiles_are_used(traced: dict[str, Any]) -> None:
    assert traced[str((*CASES[3], True))] == {"rows": 1}
    assert [traced[str((*case, False))] for case in CASES[:2]] == [{"rows": 1}] * 2
    assert traced[str((*CASES[2], False))] == DEQUANTISED
