"""Variants of kernels that Triton compiles while requests are served: few, and none for the size of a batch.

A variant is compiled at its first launch, in the middle of a request, which takes a second or more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.kernels.interpreted import run_compiling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SUPPORT = Path(__file__).parents[2] / "support" / "kernels"
MOST = {
    "_rows_kernel": 9,  # three quantisations, three numbers of rows
    "_keep_kernel": 6,
    "_small_linear_kernel": 15,  # with and without gate and residual, in tiles of 16, 32 and 64 rows, in two types
    "_attend_kernel": 6,
}
"""Most variants of a kernel in the launches of ``count_variants.py``; of the others, five."""


def count(*specialised: str) -> dict[str, Any]:
    counted: dict[str, Any] = json.loads(run_compiling(SUPPORT / "count_variants.py", *specialised))
    return counted


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    return count()


def test_sizes_of_a_batch_make_no_variants(counted: dict[str, Any]) -> None:
    """Numbers of rows, tokens and nodes, and the addresses of tables, are no properties that Triton compiles for."""
    assert {name: kernel["varying"] for name, kernel in counted.items() if kernel["varying"]} == {}


def test_constants_make_few_variants(counted: dict[str, Any]) -> None:
    variants = {name: kernel["variants"] for name, kernel in counted.items()}
    assert {name: number for name, number in variants.items() if number > MOST.get(name, 5)} == {}


def test_specialised_arguments_are_detected() -> None:
    """The same launches with Triton's default for a number of rows and for a table."""
    counted = count("_small_linear_kernel.rows", "_rope_cache_kernel.slots_T")
    assert counted["_small_linear_kernel"]["varying"] == ["rows"]
    assert counted["_rope_cache_kernel"]["varying"] == ["slots_T"]
