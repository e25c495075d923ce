"""KV compaction against a loop over lists. On a CPU the operation is its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.kv_keep.op import kv_keep

BLOCK = 4


def cache(layers: int, blocks: int, heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (layers, 2, blocks, BLOCK, heads, 3)
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def by_definition(before: Tensor, sources: list[int], targets: list[int]) -> Tensor:
    """Return the expected cache: in every layer, keys and values of a target are those that its source held before."""
    after = before.clone()
    for source, target in zip(sources, targets, strict=True):
        for layer in range(before.shape[0]):
            for half in range(2):
                row = before[layer, half, source // BLOCK, source % BLOCK]
                after[layer, half, target // BLOCK, target % BLOCK] = row
    return after


def cache_after(before: Tensor, sources: list[int], targets: list[int]) -> Tensor:
    after = before.clone()
    kv_keep(after, torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    return after


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Draw (blocks, sources, targets) of a move.

    Targets are unique, sources and targets may overlap in any way, and some pairs move nothing.
    """
    blocks = draw(st.integers(2, 6))
    slots = st.integers(BLOCK, blocks * BLOCK - 1)
    targets = draw(st.lists(slots, max_size=8, unique=True))
    sources = [draw(slots) for _ in targets]
    nothing = draw(st.integers(0, 3))
    order = draw(st.permutations(range(len(targets) + nothing)))
    pairs = [*zip(sources, targets, strict=True), *[(0, 0)] * nothing]
    return blocks, [pairs[i][0] for i in order], [pairs[i][1] for i in order]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=40, deadline=None)
@given(move=moves(), layers=st.integers(1, 3), heads=st.integers(1, 3))
def test_targets_receive_the_source_rows(
    dtype: torch.dtype, move: tuple[int, list[int], list[int]], layers: int, heads: int
) -> None:
    blocks, sources, targets = move
    before = cache(layers, blocks, heads, dtype)
    assert torch.equal(cache_after(before, sources, targets), by_definition(before, sources, targets))


SHIFT, CYCLE, PATH = ([5, 6, 7], [6, 7, 8]), ([5, 9, 13], [9, 13, 5]), ([6, 9, 14], [5, 6, 7])


@pytest.mark.parametrize("move", [SHIFT, CYCLE, PATH], ids=["shift", "cycle", "path"])
def test_overlapping_moves(move: tuple[list[int], list[int]]) -> None:
    before = cache(2, 5, 2)
    assert torch.equal(cache_after(before, *move), by_definition(before, *move))
