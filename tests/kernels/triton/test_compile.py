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
from interpreted import kernel_modules

SUPPORT = Path(__file__).parents[1] / "support"
SHARED_BYTES = 227 * 1024
"""Maximum shared memory of one program on an H100 or H200 multiprocessor, in bytes."""


@pytest.fixture(scope="module")
def launches() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, SUPPORT / "compile_all.py"],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


@pytest.mark.timeout(1200)
def test_every_kernel_compiles_and_fits(launches: dict[str, Any]) -> None:
    for name, launch in launches.items():
        assert launch["kernels"], name
        assert launch["shared_bytes"] <= SHARED_BYTES, name


@pytest.mark.timeout(1200)
def test_every_kernel_is_launched(launches: dict[str, Any]) -> None:
    """The launches cover every function named ``*_kernel`` of every module."""
    there = set()
    for module in kernel_modules():
        there |= {name for name in vars(sys.modules[module]) if name.endswith("_kernel")}
    compiled = {kernel for launch in launches.values() for kernel in launch["kernels"]}
    assert compiled == there
