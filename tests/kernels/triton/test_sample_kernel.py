"""Thresholds of the sampling kernel, interpreted, against the reference's sort.

A token at the edge of top-p may fall on either side, since sums are taken in another order; no other token may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.sample import kernel, op, reference

Row = tuple[float, int, float, float]
"""(temperature, top-k, top-p, min-p)."""
ROWS: list[Row] = [
    (0.7, 0, 1.0, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.8, 5, 0.6, 0.05),
    (1.0, 20, 0.95, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.3),
    (2.0, 1000, 0.999, 0.0),
]
BLOCK = 128


def columns(rows: list[Row]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    reals = [torch.tensor(column, dtype=torch.float32) for column in (temperature, top_p, min_p)]
    return reals[0], (torch.tensor(top_k), reals[1], reals[2])


def logits_of(rows: int, vocab: int, spread: float = 3.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, vocab, generator=generator)).to(dtype)


def by_kernel(module: ModuleType, logits: Tensor, rows: list[Row], room: int = 64) -> Tensor:
    temperature, truncation = columns(rows)
    thresholds = module.cuts(logits, temperature, truncation, block=BLOCK, room=room)
    written: Tensor = module.processed(logits, temperature, thresholds, block=BLOCK)
    return written


def by_reference(logits: Tensor, rows: list[Row], nudge: float = 0.0) -> Tensor:
    temperature, (top_k, top_p, min_p) = columns(rows)
    return reference.processed(logits.double(), temperature, top_k, torch.where(top_p < 1, top_p + nudge, 1), min_p)


def same(actual: Tensor, wanted: Tensor) -> Tensor:
    """Return [R] whether each row keeps the same tokens with the same log-probabilities."""
    finite = torch.isfinite(wanted)
    near = torch.where(finite, (actual - wanted).abs() < 2e-4, True)
    return (torch.isfinite(actual) == finite).all(-1) & near.all(-1) & ~actual.isnan().any(-1)


def matches_reference(actual: Tensor, logits: Tensor, rows: list[Row]) -> bool:
    return bool(
        (
            same(actual, by_reference(logits, rows))
            | same(actual, by_reference(logits, rows, 2e-6))
            | same(actual, by_reference(logits, rows, -2e-6))
        ).all()
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("vocab", "spread"), [(1, 3.0), (7, 0.01), (100, 3.0), (300, 0.05), (300, 6.0)])
def test_processed_tokens_equal_the_reference(vocab: int, spread: float, dtype: torch.dtype) -> None:
    """Flat rows have more candidates than the list holds and are searched as a whole; half precision has many ties."""
    logits = logits_of(len(ROWS), vocab, spread, dtype)
    assert matches_reference(by_kernel(kernel, logits, ROWS), logits, ROWS)


SAMPLED = st.tuples(
    st.sampled_from((0.3, 1.0, 1.9)),
    st.sampled_from((0, 1, 2, 5, 1000)),
    st.sampled_from((1.0, 0.95, 0.5, 0.1)),
    st.sampled_from((0.0, 0.0, 0.01, 0.2)),
)


@settings(max_examples=12, deadline=None)
@given(st.lists(SAMPLED, min_size=1, max_size=3), st.integers(2, 150), st.sampled_from((0.3, 3.0)), st.integers(0, 99))
def test_random_rows_equal_the_reference(rows: list[Row], vocab: int, spread: float, seed: int) -> None:
    logits = logits_of(len(rows), vocab, spread, seed=seed)
    assert matches_reference(by_kernel(kernel, logits, rows), logits, rows)


def test_blocked_tokens_and_ties() -> None:
    """Zeros of both signs are equal, and -inf is never kept."""
    logits = torch.tensor([[0.0, -0.0, -math.inf, 0.0, -0.0, -3.0], [2.0, 2.0, 2.0, -math.inf, 1.0, 2.0]])
    rows = [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.6, 0.0)]
    actual = by_kernel(kernel, logits, rows)
    assert torch.isfinite(actual).int().tolist() == [[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]]
    assert matches_reference(actual, logits, rows)


def test_rows_are_independent() -> None:
    logits = logits_of(len(ROWS), 100)
    together = by_kernel(kernel, logits, ROWS)
    assert torch.equal(together[3:4], by_kernel(kernel, logits[3:4], ROWS[3:4]))


@pytest.mark.slow
def test_candidate_list_size_does_not_change_the_output() -> None:
    logits = logits_of(4, 200, 1.0)
    assert torch.equal(by_kernel(kernel, logits, ROWS[1:5], 8), by_kernel(kernel, logits, ROWS[1:5], 256))


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("truncated", [False, True])
def test_the_op_runs_the_kernel(truncated: bool) -> None:
    rows = ROWS[1:4] if truncated else ROWS[:1] * 3
    temperature, (top_k, top_p, min_p) = columns(rows)
    logits = logits_of(3, 50)
    actual = op.processed(logits, temperature, top_k, top_p, min_p, truncated=truncated)
    assert matches_reference(actual, logits, rows)


BUGS: dict[str, tuple[str, str]] = {
    "the temperature is forgotten": ("tl.where(temperature > 0, temperature, 1.0)", "1.0"),
    "k is one less": ("top_k += tl.load(top_k_R + row)", "top_k += tl.load(top_k_R + row) - 1"),
    "top-p counts what top-k cut": ("            total = 0.0\n", "            pass\n"),
    "min-p is a floor under probabilities": ("floor = top + tl.log(", "floor = tl.log("),
    "all equals at the threshold stay": ("(place <= equals)", "(place >= 0)"),
    "one equal too few": ("equal & (place <= equals)", "equal & (place < equals)"),
    "negative numbers are out of order": ("tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)", "bits"),
    "the last candidate is left out": (
        "tl.where(listed > 0, near_count, vocab_size)",
        "tl.where(listed > 0, near_count - 1, vocab_size)",
    ),
    "the sum is of all": ("total = above + tl.minimum(equals, seen) * each", "pass"),
    "one block of candidates is read again and again": ("list_C + place, mask", "list_C + place % BLOCK, mask"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Callable[[ModuleType, str, str], ModuleType]) -> None:
    rows: list[Row] = [
        (0.5, 4, 0.8, 0.0),
        (1.9, 0, 0.9, 0.2),
        (0.7, 3, 1.0, 0.0),
        (1.0, 0, 0.3, 0.0),
        (1.0, 150, 0.9, 0),
    ]
    logits = logits_of(len(rows), 200, 2.0, torch.float16)
    logits[3, ::7] = 9.0
    assert not matches_reference(by_kernel(plant(kernel, *BUGS[bug]), logits, rows, 160), logits, rows)


def test_unmodified_kernel_passes_the_bug_check() -> None:
    rows: list[Row] = [
        (0.5, 4, 0.8, 0.0),
        (1.9, 0, 0.9, 0.2),
        (0.7, 3, 1.0, 0.0),
        (1.0, 0, 0.3, 0.0),
        (1.0, 150, 0.9, 0),
    ]
    logits = logits_of(len(rows), 200, 2.0, torch.float16)
    logits[3, ::7] = 9.0
    assert matches_reference(by_kernel(kernel, logits, rows, 160), logits, rows)
