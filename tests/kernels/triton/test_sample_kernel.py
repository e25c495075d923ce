"""Thresholds of the sampling kernel, interpreted, against the reference's sort.

A token at the edge of top-p may fall on either side, since sums are taken in another order; no other token may differ.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.sample import kernel, op, reference
from support.kernels.interpreted import Plant, random

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
    return (spread * random(rows, vocab, seed=seed)).to(dtype)


def by_kernel(module: ModuleType, logits: Tensor, rows: list[Row], room: int = 64, block: int = BLOCK) -> Tensor:
    temperature, truncation = columns(rows)
    thresholds = module.cuts(logits, temperature, truncation, size=BLOCK, block=block, room=room)
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


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("truncated", [False, True])
def test_the_op_runs_the_kernel(truncated: bool) -> None:
    rows = ROWS[1:4] if truncated else ROWS[:1] * 3
    temperature, (top_k, top_p, min_p) = columns(rows)
    logits = logits_of(3, 50)
    actual = op.processed(logits, temperature, top_k, top_p, min_p, truncated=truncated)
    assert matches_reference(actual, logits, rows)


VERY: list[Row] = [
    (0.6, 0, 0.9, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 1, 0.5, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 0.999999, 0.0),
    (1.0, 333, 0.9, 0.0),
    (1.0, 10_000, 1.0, 0.0),
    (0.05, 50, 0.95, 0.0),
    (30.0, 0, 0.97, 0.0),
    (0.0, 5, 0.9, 0.1),
    (1.0, 30, 1.0, 1e-3),
    (1.0, 0, 1.0, 1.0),
]


@pytest.mark.slow
def test_edges_of_the_parameters() -> None:
    """A greedy row is treated as one of temperature 1."""
    rows = [(temperature or 1.0, *cuts) for temperature, *cuts in VERY]
    for spread, dtype in ((2.0, torch.float32), (2.0, torch.bfloat16), (0.0, torch.float32), (60.0, torch.float32)):
        logits = logits_of(len(VERY), 333, spread, dtype)
        for room in (40, 512):
            assert matches_reference(by_kernel(kernel, logits, VERY, room, 512), logits, rows)


def test_masked_rows() -> None:
    """A grammar leaves few tokens, here in the last slice, or none, which chooses nothing."""
    logits = logits_of(len(VERY) + 1, 333)
    logits[:, :300] = -math.inf
    rows = [*VERY, (1.0, 3, 0.5, 0.0)]
    logits[-1] = -math.inf
    actual = by_kernel(kernel, logits, rows)
    assert matches_reference(actual[:-1], logits[:-1], [(temperature or 1.0, *cuts) for temperature, *cuts in VERY])
    assert (actual[-1] == -math.inf).all()


SHARES = (0.05, 0.3, 0.5, 0.7, 0.9, 0.98, 0.999)


def shares(module: ModuleType) -> bool:
    """Return whether rows of many likely tokens are right for many shares, after top-k and without."""
    rows: list[Row] = [(t, k, p, 0.0) for t, k in ((1.0, 0), (1.0, 200), (0.3, 0)) for p in SHARES]
    logits = logits_of(1, 520, 0.7).expand(len(rows), -1).contiguous()
    return matches_reference(by_kernel(module, logits, rows, 512, 512), logits, rows)


@pytest.mark.slow
def test_shares_of_flat_rows() -> None:
    assert shares(kernel)


BOUNDS: dict[str, tuple[str, str]] = {
    "the greatest mass of a bin is taken for certain": ("must_H = (least_above_H", "must_H = (most_above_H"),
    "the least mass of a bin is taken for the greatest": ("may_H = most_above_H", "may_H = least_above_H"),
    "what is below is cut too soon": ("tl.sum(most_H, 0) - most_above_H", "tl.sum(least_H, 0) - least_above_H"),
    "what is below is cut too late": ("tl.sum(least_H, 0) - least_above_H", "tl.sum(most_H, 0) - most_above_H"),
    "a share of all, though top-k cut some": ("tl.where(h < far, least_H, 0.0), 0), 1.0)", "most_H, 0), 1.0)"),
    "the mass above the candidates is forgotten": ("top_p * total - above", "top_p * total"),
    "the tokens above the candidates are forgotten": ("k - tl.sum(tl.where(h < near, counts_H, 0), 0)", "k"),
    "a slice overwrites the one before": ("tl.cumsum(candidates_S, 0) - candidates_S", "0 * candidates_S"),
    "a slice is left out": ("(row + 1) * slices * 256", "((row + 1) * slices - 1) * 256"),
    "slices begin one token late": ("token = piece * BLOCK + tl.arange", "token = piece * BLOCK + 1 + tl.arange"),
    "the best of the first slice is the best": ("mask=s < slices, other=other", "mask=s < 1, other=other"),
}


@pytest.mark.parametrize("bug", BOUNDS)
def test_bugs_in_the_search_for_candidates_are_detected(bug: str, plant: Plant) -> None:
    assert not shares(plant(kernel, *BOUNDS[bug]))


BUGS: dict[str, tuple[str, str]] = {
    "the temperature is forgotten": ("tl.where(temperature > 0, temperature, 1.0)", "1.0"),
    "k is one less": ("tl.load(top_k_R + row), tl", "tl.load(top_k_R + row) - 1, tl"),
    "top-p counts what top-k cut": ("total = above\n", "pass\n"),
    "min-p is a floor under probabilities": ("top + tl.log(", "tl.log("),
    "all equals at the threshold stay": ("(place <= equals)", "(place >= 0)"),
    "one equal too few": ("equal & (place <= equals)", "equal & (place < equals)"),
    "negative numbers are out of order": ("tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)", "bits"),
    "the last candidate is left out": (
        "tl.where(listed > 0, listed, vocab_size)",
        "tl.where(listed > 0, listed - 1, vocab_size)",
    ),
    "the sum is of all": ("total = above + better + tl.minimum(equals, seen) * each", "pass"),
    "one block of candidates is read again and again": ("list_C + place, mask", "list_C + place % BLOCK, mask"),
}


def finds_no_difference(module: ModuleType) -> bool:
    rows: list[Row] = [(0.5, 4, 0.8, 0.0), (1.9, 0, 0.9, 0.2), (0.7, 3, 1.0, 0.0), (1.0, 0, 0.3, 0.0), (1, 150, 0.9, 0)]
    logits = logits_of(len(rows), 200, 2.0, torch.float16)
    logits[3, ::7] = 9.0
    logits[4] -= 20.0
    return matches_reference(by_kernel(module, logits, rows, 160), logits, rows)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    assert not finds_no_difference(plant(kernel, *BUGS[bug]))


def test_unmodified_kernel_passes_the_bug_check() -> None:
    assert finds_no_difference(kernel)
