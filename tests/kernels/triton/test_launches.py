"""Launches of captured steps of Llama-3.1-8B, traced with fake CUDA tensors, against benchmarks/gpu/launches.json.

The trace runs in a process of its own, because Triton either compiles or interprets. It fails at every tensor on the
CPU and every read of a device value.
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


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    counted: dict[str, Any] = json.loads(run_compiling(BENCHMARKS / "launches.py", paths=(str(BENCHMARKS),)))
    return counted


@pytest.mark.parametrize("case", RECORDED)
def test_launches_are_those_of_the_table(case: str, traced: dict[str, Any]) -> None:
    """A step that needs more launches fails. One that needs fewer is recorded by ``launches.py --write``."""
    assert traced[case] == RECORDED[case]


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


def test_contact_with_the_host_is_refused() -> None:
    printed = run_compiling("-c", PLANTED.format(list(CONTACTS)), paths=(str(BENCHMARKS),))
    for words, line in zip(CONTACTS.values(), printed.splitlines(), strict=True):
        assert words in line
