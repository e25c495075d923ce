"""Bookkeeping of a decode step: interpreted kernels against their reference, over random trees and padding rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import astuple, dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.step_tables import commit_kernel, kernel, reference
from specdecode_kernels.step_tables.tables import SamplingTables, SlotState, Verified
from support.kernels.interpreted import Plant

pytestmark = pytest.mark.usefixtures("poisoned")

NODES, PAGE, COLUMNS, RANKS, RING, WIDTH, SLOTS = 9, 4, 12, 3, 5, 6, 7
REACH = PAGE * COLUMNS


def functions(*modules: ModuleType) -> Any:
    """Return an object with the functions of several modules."""
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


KERNELS = functions(kernel, commit_kernel)


@dataclass
class Step:
    """State and tables of a step of ``len(trees)`` rows, of which those without nodes are padding."""

    state: SlotState
    slots_B1: Tensor
    live_B1: Tensor
    sampling: SamplingTables
    trees: list[list[int]]
    depth: int

    @property
    def starts(self) -> Tensor:
        return torch.tensor([0, *torch.tensor([len(tree) for tree in self.trees]).cumsum(0).tolist()])

    def table(self, values: Callable[[list[int], int], int], padding: int) -> Tensor:
        """Return ``values(tree, node)`` of all nodes, [B, N]."""
        return torch.tensor(
            [[values(tree, node) if node < len(tree) else padding for node in range(NODES)] for tree in self.trees]
        )


def depth_of(tree: list[int], node: int) -> int:
    return 0 if tree[node] < 0 else 1 + depth_of(tree, tree[node])


def rank_of(tree: list[int], node: int) -> int:
    return sum(parent == tree[node] for parent in tree[:node])


TREES = {
    "a root": [[-1]],
    "chains": [[-1, 0, 1, 2], [-1, 0], [-1]],
    "a tree and padding": [[-1, 0, 0, 1, 1, 2, 3, 6], [-1, 0, 0, 0, 1], [], []],
    "only padding": [[], []],
}


def make(trees: list[list[int]], seed: int = 0, *, cuts: bool = True) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    batch = len(trees)
    blocks_SM = 1 + torch.randperm(SLOTS * COLUMNS, generator=generator).view(SLOTS, COLUMNS)
    state = SlotState(ints(4, SLOTS, REACH), ints(REACH - NODES - 2, SLOTS), blocks_SM, PAGE)
    live_B1 = torch.tensor([int(bool(tree)) for tree in trees] + [0])
    slots_B1 = torch.where(live_B1 > 0, torch.randperm(SLOTS - 1, generator=generator)[: batch + 1], SLOTS - 1)
    rates = torch.rand(3, batch + 1, generator=generator)
    truncation = Truncation(ints(9, batch + 1), rates[1], rates[2]) if cuts else None
    depth = max((depth_of(tree, node) for tree in trees for node in range(len(tree))), default=0)
    return Step(state, slots_B1, live_B1, SamplingTables(rates[0], ints(99, batch + 1), truncation), trees, depth)


def packed_of(module: Any, step: Step, rows: Any, *, depths: bool) -> Any:
    sequence = [b for b, tree in enumerate(step.trees) for _ in tree] + [len(step.trees)] * 2
    offset = [node for tree in step.trees for node in range(len(tree))] + [0, 0]
    depth = [depth_of(tree, node) for tree in step.trees for node in range(len(tree))] + [0, 0]
    tables = torch.tensor(sequence), torch.tensor(offset), torch.tensor(depth) if depths else None
    return module.pack(step.state, rows, step.sampling, *tables, 20)


def draft(module: Any, step: Step, rows: Any, seed: int) -> Tensor:
    """Write random proposals behind all inner nodes, level by level, with a padding node in every level."""
    generator = torch.Generator().manual_seed(seed)
    trees = step.table(lambda tree, node: tree[node], -1), step.table(rank_of, 0), step.table(depth_of, -1)
    ranked_BNK = torch.full((len(step.trees), NODES, RANKS + 1), -1)
    for depth in range(step.depth):
        inner = [(b, node) for b, tree in enumerate(step.trees) for node in range(len(tree)) if node in tree]
        level = [(b, node) for b, node in inner if depth_of(step.trees[b], node) == depth]
        sequence, node = zip(*level, (len(step.trees), 0), strict=True)
        ranked_RK = torch.randint(-1, 4, (len(node), RANKS), generator=generator)
        at = torch.tensor(sequence), torch.tensor(node)
        module.write_children(step.state, rows, ranked_RK, *at, depth, trees, ranked_BNK)
    return ranked_BNK


def run(module: Any, step: Step, *, seed: int, drafts: bool, limited: bool) -> list[Any]:
    """Return all results of a step and its state afterwards, without what padding rows may write in any order."""
    step = deepcopy(step)
    generator = torch.Generator().manual_seed(seed)
    rows = module.begin(step.state, step.slots_B1, step.live_B1)
    ranked_BNK = draft(module, step, rows, seed) if drafts else None
    passes = [packed_of(module, step, rows, depths=depths) for depths in (True, False)]
    tokens_T = passes[0].tokens_T
    chosen_T = torch.randint(0, 4, tokens_T.shape, generator=generator)
    limit_B = (
        torch.randint(0, 3, (len(step.trees),), generator=generator) if limited else torch.full((len(step.trees),), 99)
    )
    trees = Verified(step.starts, step.table(lambda tree, node: tree[node], -1), tokens_T, chosen_T)
    done = module.commit(step.state, rows, trees, ranked_BNK, limit_B, step.depth)
    aux_TA = torch.randn(len(tokens_T), WIDTH, generator=generator)
    ring, blocks = torch.zeros(SLOTS, RING + 1, WIDTH), torch.zeros(SLOTS * COLUMNS + 1, WIDTH)
    module.store_states(rows, trees.query_start, done.out, step.depth, aux_TA, ring, blocks, PAGE)
    step.state.tokens_SP[:, -1] = 0
    step.state.tokens_SP[-1] = 0
    stored = step.state.tokens_SP, step.state.length_S[:-1], ring[:-1, :RING], blocks[1:]
    results = [*astuple(rows), ranked_BNK, *(part for one in passes for part in astuple(one)), *astuple(done), *stored]
    return [part for result in results for part in (result if isinstance(result, tuple) else (result,))]


def matches(module: Any, step: Step, **how: Any) -> bool:
    pairs = zip(run(module, step, **how), run(reference, step, **how), strict=True)
    return all(actual is wanted is None or torch.equal(actual, wanted) for actual, wanted in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("cuts", [False, True])
def test_a_step(name: str, cuts: bool) -> None:
    for seed in range(6):
        step = make(TREES[name], seed, cuts=cuts)
        assert matches(KERNELS, step, seed=seed, drafts=step.depth > 0, limited=bool(seed % 2))
        assert matches(KERNELS, step, seed=seed, drafts=False, limited=False)


def test_states_are_not_stored_by_block_without_a_place_for_them() -> None:
    step = make(TREES["chains"])
    rings = []
    for module in (KERNELS, reference):
        rows = module.begin(step.state, step.slots_B1, step.live_B1)
        out = torch.full((3, 3 * step.depth + 3), -1)
        ring = torch.zeros(SLOTS, RING + 1, WIDTH)
        aux_TA = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
        module.store_states(rows, step.starts, out, step.depth, aux_TA, ring, None, PAGE)
        rings.append(ring[:-1, :RING])
    assert torch.equal(*rings)
    assert rings[0].any(), "the states of the roots"


BUGS = {
    "the root of padding is not 0": ("tl.load(length_S + slot) * tl.load(live_B1 + row)", "tl.load(length_S + slot)"),
    "positions are not clamped": ("tl.minimum(position, last_position)", "position"),
    "the depth is the node": ("if DEPTHS:", "if False:"),
    "the next position is this one": ("position + 1, mask=real", "position, mask=real"),
    "the place is in another block": ("block * PAGE + index % PAGE", "block * PAGE"),
    "children of the root": ("other=-1) == node", "other=-1) == 0"),
    "a missing proposal stays": ("mask=child & (rank < K), other=0), 0)", "mask=child & (rank < K), other=0), -1)"),
    "the limit is ignored": ("& (count < limit)", ""),
    "a cut is no miss": ("tl.where(count == limit, K, rank)", "rank"),
    "a child of any node": ("(parent_N == at) & ", ""),
    "the bonus token is lost": ("alive = here <= count", "alive = here < count"),
    "keys move one too far": ("tl.where(goes, 1 + here, 0)", "tl.where(goes, 2 + here, 0)"),
    "the length is one short": ("root + 1 + count)", "root + count)"),
    "the state of the root for all": ("aux_TA + (start + node) * width", "aux_TA + start * width"),
    "states of every position by block": ("(a < width) & ends", "a < width"),
    "the ring is one longer": ("position % ring", "position % (ring + 1)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    old, new = BUGS[bug]
    drafting = old in inspect.getsource(kernel)
    planted = plant(kernel if drafting else commit_kernel, old, new)
    wrong = functions(planted, commit_kernel) if drafting else functions(kernel, planted)
    steps = [(make(TREES[name], seed), seed) for name in ("a tree and padding", "chains") for seed in range(6)]
    assert not all(matches(wrong, step, seed=seed, drafts=True, limited=bool(seed % 2)) for step, seed in steps)
