"""Masks at the nodes of trees: the path that each mask is computed for, and rows without a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdecode_worker.sampling.sampler import BatchTokens, SampledRows, TokenMasks
from specdecode_worker.sampling.trees import PLAIN, Tree, forest_of, given_chain

SIZE, CPU = 70, torch.device("cpu")
TREE = Tree((-1, 0, 0, 1, 3), 4)
"""Two children of the root, a grandchild, and a shadow node."""
VERIFIED = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
"""Verified nodes of the batch, one tree after the other: (sequence, node)."""


class SumGuide:
    """Guide that allows exactly the token whose id is the sum of the path, and no path with token 9."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def mask(self, path: Sequence[int] = ()) -> NDArray[np.uint32] | None:
        self.asked.append(tuple(path))
        if 9 in path:
            return None
        mask = np.zeros(3, dtype=np.uint32)
        mask[sum(path) // 32] = np.uint32(1 << sum(path) % 32)
        return mask


def nodes(*places: tuple[int, int]) -> SampledRows:
    batch, node = (torch.tensor(column) for column in zip(*places, strict=True))
    return rows_of(batch, node)


def rows_of(batch: torch.Tensor, node: torch.Tensor) -> SampledRows:
    none = torch.zeros_like(batch)
    return SampledRows(batch, node, none.float(), none, none, None)


def allowed(masks: TokenMasks, *places: tuple[int, int], mask_rows: torch.Tensor | None = None) -> list[list[int]]:
    """Return the tokens that nodes may choose. ``mask_rows`` are those that `TokenMasks.prepare` returned."""
    rows = nodes(*places)
    if mask_rows is not None:
        rows = replace(rows, mask_row_R=mask_rows[[VERIFIED.index(place) for place in places]])
    blocked = masks.blocked(rows)
    assert blocked.shape == (len(places), SIZE)
    return [torch.nonzero(~row)[:, 0].tolist() for row in blocked]


def masks_of(guide: SumGuide, tokens: Sequence[int]) -> TokenMasks:
    """Return the masks of a batch whose second sequence is guided; its tree has these tokens."""
    tokens_SP = torch.zeros(3, 20, dtype=torch.int64)
    tokens_SP[2, 6 : 6 + len(tokens)] = torch.tensor(tokens)
    texts = BatchTokens(tokens_SP, torch.tensor([0, 2]), torch.tensor([3, 5]))
    return TokenMasks([None, guide], texts, forest_of((PLAIN, TREE), CPU), SIZE)


EVERY = list(range(SIZE))


@pytest.mark.parametrize("prepared", [False, True], ids=["while drafting", "for the target"])
def test_masks_follow_the_path_of_each_node(prepared: bool) -> None:
    guide = SumGuide()
    masks = masks_of(guide, [30, 4, 35, 2])
    mask_rows = None
    if prepared:
        masks.load_tokens()
        mask_rows = masks.prepare()
    found = allowed(masks, (1, 0), (1, 1), (0, 0), (1, 2), (1, 3), mask_rows=mask_rows)
    assert found == [[0], [30], EVERY, [4], [65]]
    assert {*guide.asked} == {(), (30,), (4,), (30, 35)}
    assert allowed(masks, (1, 3), (1, 0), mask_rows=mask_rows) == [[65], [0]]
    assert len(guide.asked) == 4, "a mask is computed once"


def test_a_path_that_the_grammar_does_not_allow_blocks_nothing() -> None:
    masks = masks_of(SumGuide(), [9, 4, 35, 2])
    assert allowed(masks, (1, 1), (1, 3), (1, 2)) == [EVERY, EVERY, [4]]


def test_no_rows_have_no_masks() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert masks_of(SumGuide(), [1, 2, 3, 4]).blocked(rows_of(none, none)).shape == (0, SIZE)


def test_given_trees_need_no_draft_pass() -> None:
    chain = given_chain(3)
    assert (chain.depth, chain.drafted_depth, chain.expanded, chain.is_chain) == (3, 0, (), True)
    forest = forest_of((chain, PLAIN), CPU)
    assert (forest.levels, forest.depth) == ((), 3)
    drafted = forest_of((chain, Tree((-1, 0, 1), 3)), CPU)
    assert [level.counts for level in drafted.levels] == [(0, 1), (0, 1)]
