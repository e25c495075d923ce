"""Bias, blocked tokens, penalties, temperature, min-p, top-k and top-p: op and reference against plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.noise.op import gumbel
from specdecode_kernels.sample import op, reference
from specdecode_kernels.top_k import op as top_k_op
from specdecode_kernels.top_k import reference as top_k_reference
from specdecode_kernels.verify import op as verify_op
from specdecode_kernels.verify import reference as verify_reference

VOCABULARY = 13
IDS = st.integers(0, VOCABULARY - 1)


@dataclass(frozen=True)
class Adjusted:
    """Adjustments and tokens of one request."""

    bias: tuple[tuple[int, float], ...] = ()
    blocked: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def texts() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(IDS, max_size=12).map(tuple)


ROWS = st.builds(
    Adjusted,
    bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=4).map(lambda d: tuple(d.items())),
    blocked=st.lists(IDS, max_size=3).map(tuple),
    allowed=st.lists(IDS, max_size=3).map(tuple),
    prompt=texts(),
    answer=texts(),
    repetition=st.sampled_from((1.0, 1.0, 0.7, 1.3)),
    frequency=st.sampled_from((0.0, 0.0, -0.6, 1.1)),
    presence=st.sampled_from((0.0, 0.0, -0.4, 1.7)),
)


def adjusted_by_definition(logits: list[float], row: Adjusted) -> list[float]:
    adjusted = []
    for token, value in enumerate(logits):
        x = value + dict(row.bias).get(token, 0.0)
        if token in row.prompt + row.answer:
            x = x / row.repetition if x > 0 else x * row.repetition
        x -= row.frequency * row.answer.count(token) + row.presence * (token in row.answer)
        adjusted.append(-math.inf if token in row.blocked or token not in (row.allowed or [token]) else x)
    return adjusted


def dense(rows: list[Adjusted]) -> dict[str, Tensor]:
    bias = torch.zeros(len(rows), VOCABULARY)
    blocked = torch.zeros(len(rows), VOCABULARY, dtype=torch.bool)
    for r, row in enumerate(rows):
        for token, value in row.bias:
            bias[r, token] = value
        blocked[r, list(row.blocked)] = True
        blocked[r] |= torch.tensor([bool(row.allowed) and token not in row.allowed for token in range(VOCABULARY)])
    words = range(VOCABULARY)
    return {
        "bias_RV": bias,
        "blocked_RV": blocked,
        "prompt_RV": torch.tensor([[token in row.prompt for token in words] for row in rows]),
        "counts_RV": torch.tensor([[float(row.answer.count(token)) for token in words] for row in rows]),
        "repetition_R": torch.tensor([row.repetition for row in rows]),
        "frequency_R": torch.tensor([row.frequency for row in rows]),
        "presence_R": torch.tensor([row.presence for row in rows]),
    }


def sparse(rows: list[Adjusted]) -> dict[str, object]:
    """Build the arguments of the op: None for adjustments that no row uses, short lists padded."""
    full = dense(rows)
    biases, stops = max(len(row.bias) for row in rows), max(len(row.blocked) for row in rows)
    padded = [[*row.bias, *[(0, 0.0)] * (biases - len(row.bias))] for row in rows]
    blocked = [[*row.blocked, *(row.blocked or (0,))[:1] * (stops - len(row.blocked))] for row in rows]
    on = torch.tensor([bool(row.blocked) for row in rows])[:, None].expand(-1, max(stops, 1))
    most = max(len(row.allowed) for row in rows)
    allowed = [[*row.allowed, *(row.allowed or (0,))[:1] * (most - len(row.allowed))] for row in rows]
    counts = any(row.repetition != 1 or row.frequency or row.presence for row in rows)
    return {
        "bias": (torch.tensor([[t for t, _ in r] for r in padded]), torch.tensor([[v for _, v in r] for r in padded]))
        if biases
        else None,
        "allowed": (torch.tensor(allowed), torch.tensor([[bool(row.allowed)] for row in rows])) if most else None,
        "blocked": (torch.tensor(blocked), on) if stops else None,
        "prompt_RV": full["prompt_RV"] if any(row.repetition != 1 for row in rows) else None,
        "counts_RV": full["counts_RV"] if counts else None,
        "repetition_R": full["repetition_R"] if any(row.repetition != 1 for row in rows) else None,
        "frequency_R": full["frequency_R"] if any(row.frequency for row in rows) else None,
        "presence_R": full["presence_R"] if any(row.presence for row in rows) else None,
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_reference_equals_plain_loops(rows: list[Adjusted]) -> None:
    logits = logits_of(len(rows), VOCABULARY, 4)
    wanted = [adjusted_by_definition(line, row) for line, row in zip(logits.tolist(), rows, strict=True)]
    actual = reference.adjusted(logits, **dense(rows))
    torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5), st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_adjustments_of_the_op_equal_the_reference(rows: list[Adjusted], dtype: torch.dtype) -> None:
    """The op equals the reference bit for bit, rows do not affect each other, and the input is not modified."""
    logits = logits_of(len(rows), VOCABULARY, 4, dtype)
    before = logits.clone()
    actual = op.adjusted(logits, **sparse(rows))  # type: ignore[arg-type]
    assert actual.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(actual, reference.adjusted(logits, **dense(rows)))
    assert torch.equal(logits, before)
    for r, row in enumerate(rows):
        assert torch.equal(actual[r : r + 1], op.adjusted(logits[r : r + 1], **sparse([row])))  # type: ignore[arg-type]


Row = tuple[float, int, float, float]
"""(temperature, top-k, top-p, min-p)."""
TEMPERATURES = st.sampled_from((0.0, 0.3, 0.7, 1.0, 1.9))
TOP_K = st.sampled_from((0, 1, 2, 5, 1000))
MIN_P = st.sampled_from((0.0, 0.0, 0.01, 0.2, 1.0))
TOP_P = st.sampled_from((1.0, 0.95, 0.5, 0.1, 1e-6))
SMALL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-5}


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Compute log-probabilities on lists.

    Sort, drop tokens too far below the best, keep the k best and those equal to the k-th, then the fewest that reach p.
    """
    if temperature == 0:
        return [0.0 if i == logits.index(max(logits)) else -math.inf for i in range(len(logits))]
    scaled = [x / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if min_p > 0:
        order = [i for i in order if scaled[i] - scaled[order[0]] >= math.log(min_p)]
    if 0 < top_k < len(order):
        order = [i for i in order if scaled[i] >= scaled[order[top_k - 1]]]
    if top_p < 1:
        order = order[: _fewest([math.exp(scaled[i] - scaled[order[0]]) for i in order], top_p)]
    total = math.log(sum(math.exp(scaled[i] - scaled[order[0]]) for i in order)) + scaled[order[0]]
    return [scaled[i] - total if i in order else -math.inf for i in range(len(scaled))]


def _fewest(weights: list[float], p: float) -> int:
    """Return the number of best tokens that reach a share of ``p``."""
    reached = 0.0
    for count, weight in enumerate(weights, start=1):
        reached += weight / sum(weights)
        if reached >= p:
            return count
    return len(weights)


def columns(rows: list[Row], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    reals = (torch.tensor(column, dtype=dtype) for column in (temperature, top_p, min_p))
    temperature_R, top_p_R, min_p_R = reals
    return temperature_R, torch.tensor(top_k), top_p_R, min_p_R


def logits_of(rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(TEMPERATURES, TOP_K, TOP_P, MIN_P), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(0, 10_000),
    st.sampled_from((torch.float64, torch.float32)),
)
def test_reference_equals_sorting(rows: list[Row], vocab: int, seed: int, dtype: torch.dtype) -> None:
    logits = logits_of(len(rows), vocab, seed, dtype)
    actual = reference.processed(logits, *columns(rows))
    assert actual.dtype == dtype
    pairs = zip(logits.tolist(), rows, strict=True)
    wanted = torch.tensor([by_definition(line, *row) for line, row in pairs], dtype=torch.float64)
    torch.testing.assert_close(actual.double(), wanted, rtol=SMALL[dtype], atol=SMALL[dtype])


SAMPLED = st.tuples(st.sampled_from((0.3, 1.0, 1.9)), TOP_K, TOP_P, MIN_P)


def _check_op_equals_reference(rows: list[Row], logits: Tensor) -> None:
    """Check that the op equals the reference bit for bit, for the batch and for single rows."""
    truncated = any(k > 0 or p < 1 or least > 0 for _, k, p, least in rows)
    actual = op.processed(logits, *columns(rows, torch.float32), truncated=truncated)
    wanted = reference.processed(logits, *columns(rows, torch.float32))
    assert actual.dtype == wanted.dtype == torch.promote_types(logits.dtype, torch.float32)
    assert torch.equal(actual, wanted)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        alone = op.processed(logits[one], *columns(rows[one], torch.float32), truncated=truncated)
        assert torch.equal(actual[one], alone)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(SAMPLED, min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
def test_op_equals_the_reference(rows: list[Row], cuts: bool, vocab: int, dtype: torch.dtype) -> None:
    rows = rows if cuts else [(temperature, 0, 1.0, 0.0) for temperature, *_ in rows]
    _check_op_equals_reference(rows, logits_of(len(rows), vocab, 3, dtype))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SAMPLED | st.tuples(st.just(1.0), st.just(0), st.floats(0.5, 0.999999), MIN_P), min_size=1, max_size=4),
    st.integers(4096, 5000),
    st.integers(0, 10_000),
    st.sampled_from((0.01, 1.0, 3.0)),
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
def test_op_equals_the_reference_when_rows_are_cut_one_by_one(
    rows: list[Row], vocab: int, seed: int, spread: float, dtype: torch.dtype
) -> None:
    """The op equals the reference for flat and steep logits; in bfloat16 many logits are equal."""
    _check_op_equals_reference(rows, logits_of(len(rows), vocab, seed, dtype) * spread)


def test_ties_of_the_kth_token_stay_and_greedy_takes_the_first_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0], [1.0, 3.0, 3.0, 2.0, 0.0]])
    probabilities = reference.processed(logits, *columns([(1.0, 2, 1.0, 0.0), (0.0, 0, 1.0, 0.0)])).exp()
    assert (probabilities[0] > 0).tolist() == [False, True, True, True, False]
    assert probabilities[1].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("cuts", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [70, 4100])
def test_rows_are_sampled_as_in_the_reference(vocab: int, cuts: bool, mapped: bool, dtype: torch.dtype) -> None:
    """On a CPU rows of a large vocabulary are processed one by one; of others, those that truncate are sorted alone."""
    rows = [(0.0, 0, 1.0, 0.0), (0.7, 9, 0.9, 0.01), (1.3, 0, 1.0, 0.0), (1.0, 0, 0.8, 0.0)]
    temperature_R, *truncation = columns(rows, torch.float32)
    fields: dict[str, Any] = {
        "temperature_R": temperature_R,
        "seed_R": torch.tensor([3, 5, 2**40, 5]),
        "position_R": torch.tensor([7, 7, 2**33, 7]),
        "truncation": reference.Truncation(*truncation) if cuts else None,
    }
    logits = logits_of(len(rows), vocab, 2, dtype)
    for noise in (None, gumbel(fields["seed_R"], fields["position_R"], vocab)):
        chosen = verify_op.choose(logits, *fields.values(), noise)
        assert torch.equal(chosen, verify_reference.chosen_tokens(logits, *fields.values()))
    ids = torch.arange(vocab).flip(0) + 50 if mapped else None
    fields |= {"vocab_size": vocab + 50 if mapped else vocab, "ids_V": ids, "sharpness": 1.7}
    proposed = top_k_op.top_k(logits, 4, **fields)
    wanted = top_k_reference.top_k(logits, 4, **fields)
    if dtype == torch.float32:
        assert torch.equal(proposed, wanted)
    else:  # equal logits of a greedy row are in any order
        assert torch.equal(proposed[1:], wanted[1:])


@pytest.mark.parametrize("vocab", [70, 4100])
def test_a_row_without_any_token_is_no_error(vocab: int) -> None:
    """All that a grammar or the allowed tokens leave may be tokens that the vocabulary of a draft has not."""
    logits = logits_of(2, vocab, 2, torch.float32)
    logits[0] = -math.inf
    temperature_R, *truncation = columns([(1.0, 0, 0.9, 0.0)] * 2, torch.float32)
    fields: dict[str, Any] = {
        "temperature_R": temperature_R,
        "seed_R": torch.tensor([3, 5]),
        "position_R": torch.tensor([7, 8]),
        "truncation": reference.Truncation(*truncation),
    }
    chosen = verify_op.choose(logits, *fields.values())
    assert 0 <= chosen[0] < vocab
    assert chosen[1] == verify_reference.chosen_tokens(logits, *fields.values())[1]
    fields |= {"vocab_size": vocab}
    proposed, best = top_k_op.top_k(logits, 4, **fields), top_k_reference.top_k(logits, 4, **fields)
    assert len(set(proposed[0].tolist())) == 4
    assert torch.equal(proposed[1], best[1])
