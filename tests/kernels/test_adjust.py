"""Bias, blocked tokens and penalties: reference against loops over tokens, op against reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.sample import op, reference

VOCABULARY = 13
IDS = st.integers(0, VOCABULARY - 1)


@dataclass(frozen=True)
class Row:
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
    Row,
    bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=4).map(lambda d: tuple(d.items())),
    blocked=st.lists(IDS, max_size=3).map(tuple),
    allowed=st.lists(IDS, max_size=3).map(tuple),
    prompt=texts(),
    answer=texts(),
    repetition=st.sampled_from((1.0, 1.0, 0.7, 1.3)),
    frequency=st.sampled_from((0.0, 0.0, -0.6, 1.1)),
    presence=st.sampled_from((0.0, 0.0, -0.4, 1.7)),
)


def by_definition(logits: list[float], row: Row) -> list[float]:
    adjusted = []
    for token, value in enumerate(logits):
        x = value + dict(row.bias).get(token, 0.0)
        if token in row.prompt + row.answer:
            x = x / row.repetition if x > 0 else x * row.repetition
        x -= row.frequency * row.answer.count(token) + row.presence * (token in row.answer)
        adjusted.append(-math.inf if token in row.blocked or token not in (row.allowed or [token]) else x)
    return adjusted


def logits_of(rows: int, dtype: torch.dtype = torch.float64, seed: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)


def dense(rows: list[Row]) -> dict[str, Tensor]:
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


def sparse(rows: list[Row]) -> dict[str, object]:
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
def test_reference_equals_plain_loops(rows: list[Row]) -> None:
    logits = logits_of(len(rows))
    wanted = [by_definition(line, row) for line, row in zip(logits.tolist(), rows, strict=True)]
    actual = reference.adjusted(logits, **dense(rows))
    torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5), st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_op_equals_the_reference(rows: list[Row], dtype: torch.dtype) -> None:
    """The op equals the reference bit for bit, rows do not affect each other, and the input is not modified."""
    logits = logits_of(len(rows), dtype)
    before = logits.clone()
    actual = op.adjusted(logits, **sparse(rows))  # type: ignore[arg-type]
    assert actual.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(actual, reference.adjusted(logits, **dense(rows)))
    assert torch.equal(logits, before)
    for r, row in enumerate(rows):
        assert torch.equal(actual[r : r + 1], op.adjusted(logits[r : r + 1], **sparse([row])))  # type: ignore[arg-type]


def test_neutral_row_is_unchanged() -> None:
    logits = logits_of(2)
    busy = Row(((3, 2.0),), (1,), (2, 3, 4), (2, 3), (4, 4), 1.3, 0.5, 0.5)
    adjusted = op.adjusted(logits, **sparse([Row(prompt=(1, 2), answer=(3, 3)), busy]))  # type: ignore[arg-type]
    assert torch.equal(adjusted[0], logits[0])
    assert not torch.equal(adjusted[1], logits[1])
