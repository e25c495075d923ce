"""Temperature, top-k and top-p: op and reference against sorting a list."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.sample import op, reference

Row = tuple[float, int, float]
"""(temperature, top-k, top-p)."""
TEMPERATURES = st.sampled_from((0.0, 0.3, 0.7, 1.0, 1.9))
TOP_K = st.sampled_from((0, 1, 2, 5, 1000))
TOP_P = st.sampled_from((1.0, 0.95, 0.5, 0.1, 1e-6))
SMALL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-5}


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Log-probabilities: sort, keep the k best and their equals, then the fewest that reach p; all by hand."""
    if temperature == 0:
        return [0.0 if i == logits.index(max(logits)) else -math.inf for i in range(len(logits))]
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if 0 < top_k < len(scaled):
        order = [i for i in order if scaled[i] >= scaled[order[top_k - 1]]]
    if top_p < 1:
        order = order[: _fewest([math.exp(scaled[i] - scaled[order[0]]) for i in order], top_p)]
    total = math.log(sum(math.exp(scaled[i] - scaled[order[0]]) for i in order)) + scaled[order[0]]
    return [scaled[i] - total if i in order else -math.inf for i in range(len(scaled))]


def _fewest(weights: list[float], p: float) -> int:
    """How many of the best reach a share of ``p``."""
    reached = 0.0
    for count, weight in enumerate(weights, start=1):
        reached += weight / sum(weights)
        if reached >= p:
            return count
    return len(weights)


def columns(rows: list[Row], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    temperature, top_k, top_p = zip(*rows, strict=True)
    return torch.tensor(temperature, dtype=dtype), torch.tensor(top_k), torch.tensor(top_p, dtype=dtype)


def logits_of(rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).to(dtype)


def wanted_of(logits: Tensor, rows: list[Row]) -> Tensor:
    pairs = zip(logits.tolist(), rows, strict=True)
    return torch.tensor([by_definition(line, *row) for line, row in pairs], dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(TEMPERATURES, TOP_K, TOP_P), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(0, 10_000),
    st.sampled_from((torch.float64, torch.float32)),
)
def test_reference_is_what_sorting_gives(rows: list[Row], vocab: int, seed: int, dtype: torch.dtype) -> None:
    logits = logits_of(len(rows), vocab, seed, dtype)
    found = reference.processed(logits, *columns(rows))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted_of(logits, rows), rtol=SMALL[dtype], atol=SMALL[dtype])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((0.3, 1.0, 1.9)), TOP_K, TOP_P), min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
def test_op_is_the_reference(rows: list[Row], cuts: bool, vocab: int, dtype: torch.dtype) -> None:
    """To the bit: without a row that cuts, the sorts are skipped, and with one, a single sort serves both."""
    rows = rows if cuts else [(temperature, 0, 1.0) for temperature, *_ in rows]
    truncated = any(k > 0 or p < 1 for _, k, p in rows)
    logits = logits_of(len(rows), vocab, 3, dtype)
    found = op.processed(logits, *columns(rows, torch.float32), truncated=truncated)
    wanted = reference.processed(logits, *columns(rows, torch.float32))
    assert found.dtype == wanted.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(found, wanted)


def test_equals_of_the_kth_stay_and_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0], [1.0, 3.0, 3.0, 2.0, 0.0]])
    found = reference.processed(logits, *columns([(1.0, 2, 1.0), (0.0, 0, 1.0)])).exp()
    assert (found[0] > 0).tolist() == [False, True, True, True, False]
    assert found[1].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_top_p_cuts_what_top_k_left() -> None:
    """0.4 / (0.4 + 0.3) already reaches 0.55: of the two that top-k leaves, one stays."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    kept = reference.processed(logits, *columns([(1.0, 2, 0.55)]))
    alone = reference.processed(logits, *columns([(1.0, 0, 0.55)]))
    assert torch.isfinite(kept).sum() == 1
    assert torch.isfinite(alone).sum() == 2


def _cut_before_temperature(logits: Tensor, t: Tensor, k: Tensor, p: Tensor) -> Tensor:
    cut = reference.processed(logits, torch.ones_like(t), k, p)
    return torch.log_softmax(cut / t[:, None], dim=-1)


def _not_normalised(logits: Tensor, t: Tensor, k: Tensor, p: Tensor) -> Tensor:
    kept = reference.processed(logits, t, k, p)
    return torch.where(torch.isfinite(kept), torch.log_softmax(logits / t[:, None], dim=-1), kept)


def _one_short(logits: Tensor, t: Tensor, k: Tensor, p: Tensor) -> Tensor:
    return reference.processed(logits, t, (k - 1).clamp(min=1), p)


def _top_p_first(logits: Tensor, t: Tensor, k: Tensor, p: Tensor) -> Tensor:
    nothing = torch.zeros_like(k)
    kept = reference.processed(logits, t, nothing, p)
    return reference.processed(kept, torch.ones_like(t), k, torch.ones_like(p))


@pytest.mark.parametrize("planted", [_cut_before_temperature, _not_normalised, _one_short, _top_p_first])
def test_planted_bugs_are_seen(planted: Callable[..., Tensor]) -> None:
    rows: list[Row] = [(0.5, 4, 0.8), (1.9, 6, 0.9), (0.7, 3, 1.0), (1.3, 5, 0.6)]
    logits = logits_of(len(rows), 12, 1)
    assert torch.allclose(reference.processed(logits, *columns(rows)), wanted_of(logits, rows))
    assert not torch.allclose(planted(logits, *columns(rows)), wanted_of(logits, rows))
