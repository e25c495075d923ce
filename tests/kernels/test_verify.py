"""Verification: the walk, multi-round sampling and KV compaction against loops over lists, op against reference.

The distribution of the emitted tokens is tested in tests/lossless/test_law.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.kv_keep.op import kv_keep
from specdecode_kernels.noise.reference import COIN_STREAM, RESIDUAL_STREAM, gumbel, uniform
from specdecode_kernels.verify import op, reference

VOCABULARY = 9


@dataclass(frozen=True)
class Trees:
    """A batch of trees, padded with parent -1, and the distributions of target and draft after every node."""

    parents: tuple[tuple[int, ...], ...]
    tokens_BN: Tensor
    logp_BNV: Tensor
    logq_BNV: Tensor
    seed_B: Tensor
    position_B: Tensor

    @property
    def parents_BN(self) -> Tensor:
        most = self.tokens_BN.shape[1]
        return torch.tensor([[*parents, *[-1] * (most - len(parents))] for parents in self.parents])

    @property
    def depth(self) -> int:
        return max(len(path_to(parents, node)) for parents in self.parents for node in range(len(parents)))


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    """Return the nodes from below the root to ``node``."""
    return [*path_to(parents, parents[node]), node] if node else []


def children_of(parents: tuple[int, ...], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node and child]


def make(parents: tuple[tuple[int, ...], ...], seed: int) -> Trees:
    """Build trees with siblings drawn from the draft without replacement.

    Padding nodes have tokens too, which must not be read.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, nodes = len(parents), max(map(len, parents))
    logits_p, logits_q = (
        torch.randn(2, batch, nodes, VOCABULARY, generator=generator, dtype=torch.float64) * 1.5
    ).unbind(0)
    logq = torch.log_softmax(logits_p + 0.5 * logits_q, dim=-1)
    tokens = torch.randint(0, VOCABULARY, (batch, nodes), generator=generator)
    for b, tree in enumerate(parents):
        for node in range(len(tree)):
            if children := children_of(tree, node):
                tokens[b, children] = logq[b, node].exp().multinomial(len(children), generator=generator)
    seeds = torch.randint(0, 2**62, (batch,), generator=generator)
    positions = torch.randint(0, 5000, (batch,), generator=generator)
    return Trees(parents, tokens, torch.log_softmax(logits_p, dim=-1), logq, seeds, positions)


def walk_by_loop(tree: tuple[int, ...], tokens: list[int], chosen: list[int]) -> tuple[list[int], int]:
    """Return (path, bonus) of a walk that follows the child with the chosen token as long as there is one."""
    path, at = [], 0
    while by_token := {tokens[child]: child for child in reversed(children_of(tree, at))}:
        if chosen[at] not in by_token:
            break
        at = by_token[chosen[at]]
        path.append(at)
    return path, chosen[at]


def rounds_by_loop(trees: Trees, b: int, *, drawn: bool | list[bool]) -> tuple[list[int], int]:
    """Run multi-round sampling of one tree on lists of floats; ``drawn`` may differ by node."""
    tree, tokens = trees.parents[b], trees.tokens_BN[b].tolist()
    path, at = [], 0
    while True:
        position = trees.position_B[b : b + 1] + 1 + len(path)
        coins = uniform(trees.seed_B[b : b + 1], position, len(tree), COIN_STREAM)[0].tolist()
        p, q = trees.logp_BNV[b, at].exp().tolist(), trees.logq_BNV[b, at].exp().tolist()
        here = drawn if isinstance(drawn, bool) else drawn[at]
        taken = None
        for child in children_of(tree, at):
            x = tokens[child]
            from_q = here and q[x] > 0
            if coins[child] < min(1, p[x] / q[x] if from_q else p[x]):
                taken = child
                break
            p = [max(a - c, 0) for a, c in zip(p, q, strict=True)] if from_q else [*p[:x], 0.0, *p[x + 1 :]]
            p, q = ([v / (sum(r) or 1) for v in r] for r in (p, [*q[:x], 0.0, *q[x + 1 :]]))
        if taken is None:
            noise = gumbel(trees.seed_B[b : b + 1], position, VOCABULARY, RESIDUAL_STREAM)[0]
            return path, int((torch.tensor(p, dtype=torch.float64).log() + noise).argmax())
        path.append(taken)
        at = taken


def unpadded(accepted: reference.Accepted) -> list[tuple[list[int], int]]:
    """Return (path, bonus) per row; checks that counts and padding agree."""
    paths = [path[:count] for path, count in zip(accepted.path_BD.tolist(), accepted.count_B.tolist(), strict=True)]
    assert (accepted.path_BD >= 0).sum(-1).tolist() == accepted.count_B.tolist()
    return list(zip(paths, accepted.bonus_B.tolist(), strict=True))


@st.composite
def trees(draw: st.DrawFn) -> Trees:
    """Draw up to five trees of up to nine nodes, including single roots; no node has more children than tokens."""
    forest = []
    for _ in range(draw(st.integers(1, 5))):
        parents = [-1]
        for node in range(1, draw(st.integers(1, 9))):
            parents.append(draw(st.integers(parents[-1] if node > 1 else 0, node - 1)))
        forest.append(tuple(parents))
    return make(tuple(forest), draw(st.integers(0, 99_999)))


@settings(max_examples=120, deadline=None)
@given(trees(), st.integers(0, 99))
def test_walk_follows_the_chosen_child(case: Trees, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen_BN = torch.randint(0, 3, case.tokens_BN.shape, generator=generator)
    case = replace(case, tokens_BN=torch.randint(0, 3, case.tokens_BN.shape, generator=generator))
    actual = reference.walk(case.parents_BN, case.tokens_BN, chosen_BN, case.depth)
    wanted = [
        walk_by_loop(tree, tokens, chosen)
        for tree, tokens, chosen in zip(case.parents, case.tokens_BN.tolist(), chosen_BN.tolist(), strict=True)
    ]
    assert unpadded(actual) == wanted


@settings(max_examples=80, deadline=None)
@given(trees(), st.booleans())
def test_multi_round_op_reference_and_loop_agree(case: Trees, drawn: bool) -> None:
    logq = case.logq_BNV if drawn else None
    args = (case.parents_BN, case.tokens_BN, case.logp_BNV, logq, case.seed_B, case.position_B)
    from_op = unpadded(op.multi_round(*args, case.depth))
    for b, tree in enumerate(case.parents):
        here = slice(len(tree))
        one = reference.multi_round(
            torch.tensor(tree),
            case.tokens_BN[b, here],
            case.logp_BNV[b, here],
            case.logq_BNV[b, here] if drawn else None,
            int(case.seed_B[b]),
            int(case.position_B[b]),
        )
        assert one == rounds_by_loop(case, b, drawn=drawn) == from_op[b]


@settings(max_examples=60, deadline=None)
@given(trees(), st.data())
def test_drawn_and_deterministic_children_mix_by_node(case: Trees, data: st.DataObject) -> None:
    """Drawn and deterministic children may be mixed by node; q has no effect at nodes with deterministic children."""
    shape = case.tokens_BN.shape
    drawn_BN = torch.tensor(data.draw(st.lists(st.booleans(), min_size=shape.numel(), max_size=shape.numel())))
    drawn_BN = drawn_BN.view(shape)
    args = (case.parents_BN, case.tokens_BN, case.logp_BNV, case.logq_BNV, case.seed_B, case.position_B)
    width = max(len(children_of(tree, node)) for tree in case.parents for node in range(len(tree)))
    actual = unpadded(op.multi_round(*args, case.depth, drawn_BN=drawn_BN, width=width))
    for b in range(len(case.parents)):
        assert actual[b] == rounds_by_loop(case, b, drawn=drawn_BN[b].tolist())


@pytest.mark.parametrize("known", [1, 2])
def test_siblings_outside_q_count_as_deterministic(known: int) -> None:
    """If q is cut to fewer tokens than there are siblings, the others were not drawn, and p/q would always accept."""
    case = make(((-1, 0, 0, 0),) * 80, 3)
    best = case.logq_BNV[:, 0].topk(3, dim=-1)
    case.tokens_BN[:, 1:] = best.indices
    cut = case.logq_BNV.masked_fill(case.logq_BNV < best.values[:, None, known - 1 : known], -torch.inf)
    case = replace(case, logq_BNV=torch.log_softmax(cut, dim=-1))
    args = (case.parents_BN, case.tokens_BN, case.logp_BNV, case.logq_BNV, case.seed_B, case.position_B)
    actual = unpadded(op.multi_round(*args, case.depth))
    assert actual == [rounds_by_loop(case, b, drawn=True) for b in range(len(case.parents))]
    assert any(path == [known + 1] for path, _ in actual), "one of them is taken now and then"
    assert any(path == [] for path, _ in actual), "and not always"


@settings(max_examples=40, deadline=None)
@given(trees())
def test_coupled_tokens_are_the_argmax_over_noise(case: Trees) -> None:
    logp_RV, seed_R, position_R = case.logp_BNV[:, 0], case.seed_B, case.position_B
    coupled = reference.coupled_tokens(logp_RV, seed_R, position_R)
    for row, token in enumerate(coupled.tolist()):
        noise = gumbel(seed_R[row : row + 1], position_R[row : row + 1], VOCABULARY)[0].tolist()
        noised = [p + g for p, g in zip(logp_RV[row].tolist(), noise, strict=True)]
        assert token == noised.index(max(noised))


def test_certain_proposals_are_always_taken_and_impossible_ones_never() -> None:
    parents, tokens = torch.tensor([-1, 0, 0, 2]), torch.tensor([0, 1, 2, 3])
    p = torch.zeros(4, VOCABULARY, dtype=torch.float64)
    p[0, 2], p[2, 3], p[3, 5] = 1, 1, 1  # the first child has probability 0
    assert reference.multi_round(parents, tokens, p.log(), None, 1, 2) == ([2, 3], 5)


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
    after = before.clone()
    kv_keep(after, torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    assert torch.equal(after, by_definition(before, sources, targets))
