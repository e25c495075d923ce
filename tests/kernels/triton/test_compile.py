"""Compilation of every kernel to H100 machine code in bf16, without a GPU.

This finds errors that the interpreter accepts: types of loop variables, shapes that are not powers of two, and
operations that do not exist for a type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.kernels.interpreted import kernel_modules

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[2] / "support" / "kernels"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "compiled-kernels.json"
RECORDED: dict[str, Any] = json.loads(RESULTS.read_text())
SHARED_BYTES = {"80": 163 * 1024, "89": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024}
"""Maximum shared memory of one program by compute capability, in bytes (CUDA's documentation)."""
SPILLS = {
    "attention, head dimension 96, fp16": 128,
    "attention, fp32": 576,
    "bookkeeping of a chain of 5": 16,
}
"""Launches that spill registers on an H100, and the most bytes of a thread's stack. The first two are no launches of a
bf16 model with heads of 64 or 128; the last one runs once in a step, as one thread block for each sequence."""


WAITING = {
    "int4, an eighth of an FFN": (0, 1),
    "int4, many outputs": (0, 1),
    "int4, fp32": (4, 1),
    "int8": (0, 1),
    "int8, fp32": (2, 0),
    "fp8": (0, 1),
    "fp8, fp16": (0, 1),
}
"""Launches whose pipelined loops wait: operands that lie unswizzled in shared memory, and loads that are not copied
ahead. Those of quantised matrices wait for their scales."""


def compile_all(*words: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, SUPPORT / "compile_all.py", *words],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


@pytest.fixture(scope="module")
def launches() -> dict[str, Any]:
    return compile_all()


@pytest.mark.timeout(1200)
def test_every_kernel_compiles_and_fits(launches: dict[str, Any]) -> None:
    for name, launch in launches.items():
        assert launch["kernels"], name
        assert launch["shared_bytes"] <= SHARED_BYTES["90"], name


@pytest.mark.timeout(1200)
def test_registers_are_spilled_where_it_is_known(launches: dict[str, Any]) -> None:
    """No launch of a bf16 model on an H100 spills, but for the named ones."""
    spilled = {name: launch["stack_bytes"] for name, launch in launches.items() if launch["stack_bytes"]}
    assert spilled.keys() <= SPILLS.keys(), spilled
    assert all(size <= SPILLS[name] for name, size in spilled.items()), spilled


@pytest.mark.timeout(1200)
def test_pipelined_loops_do_not_wait(launches: dict[str, Any]) -> None:
    """Operands of matrix products are swizzled in shared memory, and everything in the loop is copied ahead of it."""
    waiting = {name: (launch["unswizzled"], launch["blocking"]) for name, launch in launches.items()}
    assert {name: counts for name, counts in waiting.items() if any(counts)} == WAITING


def test_a_planted_conflict_is_detected() -> None:
    """The norm of a product's input within its loop, as it was once: 56 us instead of 17 on an H200."""
    launch = compile_all("90", "planted")["planted"]
    assert (launch["unswizzled"], launch["blocking"]) == (1, 1)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_recorded_launches_fit_every_gpu(capability: str) -> None:
    """The table of hack/gpu-compile has every launch, and each has the shared memory that it needs."""
    recorded = RECORDED["capabilities"][capability]
    large = {name: launch["shared_bytes"] for name, launch in recorded.items()}
    assert {name: size for name, size in large.items() if size > SHARED_BYTES[capability]} == {}
    assert recorded.keys() == RECORDED["capabilities"]["90"].keys()


@pytest.mark.timeout(1200)
def test_every_launch_is_recorded(launches: dict[str, Any]) -> None:
    assert launches.keys() == RECORDED["capabilities"]["90"].keys(), "run hack/gpu-compile"


@pytest.mark.timeout(1200)
def test_every_kernel_is_launched(launches: dict[str, Any]) -> None:
    """The launches cover every function named ``*_kernel`` of every module."""
    there = set()
    for module in kernel_modules():
        there |= {name for name in vars(sys.modules[module]) if name.endswith("_kernel")}
    compiled = {kernel for launch in launches.values() for kernel in launch["kernels"]}
    assert compiled == there
