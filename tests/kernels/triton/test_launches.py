"""Launches of captured steps of Llama-3.1-8B, traced with fake CUDA tensors, against benchmarks/gpu/launches.json.

The trace runs in a process of its own, because Triton either compiles or interprets. It fails at every tensor on the
CPU and every read of a device value.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "gpu"
RECORDED: dict[str, Any] = json.loads((BENCHMARKS / "launches.json").read_text())


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(str(place) for place in (BENCHMARKS, *sys.path) if place)
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment | {"PYTHONPATH": path}
    )


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    ran = run(str(BENCHMARKS / "launches.py"))
    assert ran.returncode == 0, ran.stderr[-4000:]
    counted: dict[str, Any] = json.loads(ran.stdout)
    return counted


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", RECORDED)
def test_launches_are_those_of_the_table(case: str, traced: dict[str, Any]) -> None:
    """A step that needs more launches fails. One that needs fewer is recorded by ``launches.py --write``."""
    assert traced[case] == RECORDED[case]


@pytest.mark.timeout(600)
def test_the_table_has_every_case(traced: dict[str, Any]) -> None:
    assert set(traced) == set(RECORDED)


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


@pytest.mark.timeout(120)
def test_contact_with_the_host_is_refused() -> None:
    ran = run("-c", PLANTED.format(list(CONTACTS)))
    for words, line in zip(CONTACTS.values(), ran.stdout.splitlines(), strict=True):
        assert words in line, ran.stderr[-2000:]
