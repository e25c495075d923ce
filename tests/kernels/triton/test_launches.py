"""Launches of captured steps of Llama-3.1-8B, traced with fake CUDA tensors, against benchmarks/gpu/launches.json.

Calls of `torch._scaled_mm` for fp8 weights run its checks of sizes, strides and scales. Traces run in processes of
their own, because Triton either compiles or interprets. They fail at every tensor on the CPU and every read of a
device value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.kernels.interpreted import run_compiling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "gpu"
RECORDED: dict[str, Any] = json.loads((BENCHMARKS / "launches.json").read_text())


def test_launches_are_those_of_the_table() -> None:
    """A step that needs more launches fails. One that needs fewer is recorded by ``launches.py --write``."""
    assert json.loads(run_compiling(BENCHMARKS / "launches.py", paths=(str(BENCHMARKS),))) == RECORDED


CONTACTS = {
    "length_S + torch.zeros(4, dtype=torch.int64)": "on the CPU",
    "length_S.add_(torch.tensor(3))": "on the CPU",
    "length_S.max().item()": "reads a value",
    "length_S.cpu()": "copies to the host",
    "length_S[length_S > 0]": "reads a value",
}
PLANTED = """
import torch
from launch_counter import HostContact, counting, fake_gpu
for code in {}:
    with fake_gpu():
        length_S = torch.zeros(4, dtype=torch.int64, device="cuda")
        try:
            with counting():
                exec(code)
            print()
        except HostContact as error:
            print(error)
"""


def test_contact_with_the_host_is_refused() -> None:
    printed = run_compiling("-c", PLANTED.format(list(CONTACTS)), paths=(str(BENCHMARKS),))
    for words, line in zip(CONTACTS.values(), printed.splitlines(), strict=True):
        assert words in line


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
SCALED, TILES, DEQUANTISED = {"split": 1, "_scaled_mm": 1, "merge": 1}, {"rows": 1}, {"dequantise": 1, "mm": 1}
PRODUCTS = {
    (64, 4096, 14336, False): (TILES, TILES),
    (65, 4096, 14336, False): (SCALED, TILES),
    (100, 28672, 4096, True): (SCALED, TILES),
    (4096, 28672, 4096, False): (dict.fromkeys(SCALED, 4), DEQUANTISED),
    (65, 4100, 4096, False): (TILES, TILES),
}
"""Launches with fp8 products and without, by (rows, outputs, inputs, with a bias).

4,096 rows of 28,672 outputs would need 940 MB for sums; they are multiplied in four calls.
"""


def test_products_of_many_rows_with_fp8_weights() -> None:
    code = TRACE.replace("CASES", repr([*PRODUCTS]))
    wanted = {str((*case, fp8)): found[not fp8] for case, found in PRODUCTS.items() for fp8 in (True, False)}
    assert json.loads(run_compiling("-c", code, paths=(str(BENCHMARKS),))) == wanted
