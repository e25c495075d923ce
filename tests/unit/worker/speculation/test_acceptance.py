"""Tests of acceptance against a simple Python implementation: emitted tokens, accepted nodes and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdecode_kernels.step_tables.op import commit
from specdecode_kernels.step_tables.tables import SlotState, StepRows, Verified
from specdecode_worker.contract import MAX_RANKS, TreeShape
from specdecode_worker.sampling.trees import PLAIN, Tree, tree_of

WORDS, NO_LIMIT, ROOT = 10, 99, 5
SHAPES = [TreeShape.parse(t) for t in ("none", "chain:1", "chain:4", "tree:3", "tree:2,2,1", "0,0,1,1,3")]


@dataclass(frozen=True)
class Outcome:
    """Result of a step: emitted tokens, accepted nodes and ranks, padded with -1, and the number of accepted nodes."""

    emitted_BD: torch.Tensor
    path_BD: torch.Tensor
    rank_BD: torch.Tensor
    count_B: torch.Tensor


def committed(verified: Verified, ranked_BNK: torch.Tensor | None, cut_depths: list[int] | None, depth: int) -> Outcome:
    """Commit a step of sequences in slots of their own, and check the tokens and lengths that it leaves there."""
    batch = len(verified.parents_BN)
    blocks = torch.arange(4 * (batch + 1)).view(batch + 1, 4)
    state = SlotState(torch.zeros(batch + 1, 60, dtype=torch.int64), torch.full((batch + 1,), ROOT), blocks, 16)
    rows = StepRows(torch.arange(batch + 1), state.length_S.clone(), blocks)
    limits = torch.tensor(cut_depths or [NO_LIMIT] * batch)
    out = commit(state, rows, verified, ranked_BNK, limits, depth).out
    outcome = Outcome(*out.split([depth + 1, depth, depth + 1, 1], dim=1))
    for b in range(batch):
        emitted = unpadded(outcome.emitted_BD[b])
        assert state.tokens_SP[b, ROOT + 1 : ROOT + 1 + len(emitted)].tolist() == emitted
        assert state.length_S[b] == ROOT + len(emitted)
    return outcome


@dataclass(frozen=True)
class Case:
    """Trees, the draft's ordering at every node, best first, and the target's choice after every verified node."""

    trees: list[Tree]
    ranked: list[list[list[int]]]
    chosen: list[list[int]]

    def tokens(self, b: int) -> list[int]:
        """Return the tokens of the nodes: the parent's ordering at the child's rank. The root's token is never read."""
        tree = self.trees[b]
        return [-2, *(self.ranked[b][tree.parents[n]][tree.ranks[n]] for n in range(1, len(tree.parents)))]

    def run(self, cut_depths: list[int] | None = None) -> Outcome:
        """Return the outcome of `commit`."""
        widest = max(len(tree.parents) for tree in self.trees)
        ranked_BNK = torch.full((len(self.trees), widest, MAX_RANKS), -1)
        parents_BN = torch.full((len(self.trees), widest), -1)
        for b, tree in enumerate(self.trees):
            parents_BN[b, : tree.verified] = torch.tensor(tree.parents[: tree.verified])
            for node in set(tree.parents[1:]):
                ranked_BNK[b, node] = torch.tensor(self.ranked[b][node])
        tokens = [token for b, tree in enumerate(self.trees) for token in self.tokens(b)[: tree.verified]]
        chosen = [token for row in self.chosen for token in row]
        starts = list(accumulate((tree.verified for tree in self.trees), initial=0))
        verified = Verified(torch.tensor(starts), parents_BN, torch.tensor(tokens), torch.tensor(chosen))
        return committed(verified, ranked_BNK, cut_depths, max(tree.depth for tree in self.trees))

    def by_hand(self, b: int) -> tuple[list[int], list[int], list[int]]:
        """Return the expected emitted tokens, path and ranks of one tree."""
        tree, tokens, node = self.trees[b], self.tokens(b), 0
        emitted, path, ranks = [], [], []
        while True:
            token = self.chosen[b][node]
            emitted.append(token)
            known = self.ranked[b][node]
            drafted = node in tree.parents[1:]
            ranks.append((known.index(token) if token in known else MAX_RANKS) if drafted else -1)
            children = [n for n in range(1, tree.verified) if tree.parents[n] == node and tokens[n] == token]
            if not children:
                return emitted, path, ranks
            node = children[0]
            path.append(node)


@st.composite
def cases(draw: Any) -> Case:
    """Draw a batch of trees with orderings and choices."""
    trees = draw(st.lists(st.builds(tree_of, st.sampled_from(SHAPES), st.integers(0, 5)), min_size=1, max_size=3))
    ordering = st.permutations(range(WORDS)).map(lambda words: list(words[:MAX_RANKS]))
    ranked = [[draw(ordering) for _ in tree.parents] for tree in trees]
    # The choices are mostly the draft's best tokens, so that paths are long. None is a token that it did not rank.
    place = st.sampled_from([0, 0, 0, 1, 1, 2, 5, 7, None])
    chosen = []
    for b, tree in enumerate(trees):
        places = [draw(place) for _ in range(tree.verified)]
        missing = [next(w for w in range(WORDS) if w not in ranked[b][n]) for n in range(tree.verified)]
        chosen.append([missing[n] if p is None else ranked[b][n][p] for n, p in enumerate(places)])
    return Case(trees, ranked, chosen)


def unpadded(row: torch.Tensor, pad: int = -1) -> list[int]:
    """Return the row without its padding."""
    return [value for value in row.tolist() if value != pad]


@given(cases())
def test_the_walk_emits_the_targets_tokens_and_keeps_their_nodes_and_ranks(case: Case) -> None:
    """Ranks are counted along the path and nowhere else."""
    outcome = case.run()
    for b in range(len(case.trees)):
        emitted, path, ranks = case.by_hand(b)
        assert unpadded(outcome.emitted_BD[b]) == emitted
        assert unpadded(outcome.path_BD[b]) == path
        assert int(outcome.count_B[b]) == len(emitted) - 1
        assert outcome.rank_BD[b].tolist() == ranks + [-1] * (outcome.rank_BD.shape[1] - len(ranks))


@given(cases(), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_a_cut_shortens_the_text_of_a_step_and_never_changes_it(case: Case, cut_depths: list[int]) -> None:
    """The token after a cut is a miss, and earlier ranks are unchanged."""
    whole, cut = case.run(), case.run(cut_depths[: len(case.trees)])
    for b in range(len(case.trees)):
        emitted, ranks = unpadded(whole.emitted_BD[b]), whole.rank_BD[b].tolist()
        count = min(len(emitted) - 1, cut_depths[b])
        assert unpadded(cut.emitted_BD[b]) == emitted[: count + 1]
        assert unpadded(cut.path_BD[b]) == unpadded(whole.path_BD[b])[:count]
        assert int(cut.count_B[b]) == count
        last = MAX_RANKS if count == cut_depths[b] and ranks[count] >= 0 else ranks[count]
        assert cut.rank_BD[b].tolist() == [*ranks[:count], last, *[-1] * (len(ranks) - count - 1)]


def test_without_a_draft_one_token_is_emitted_and_nothing_is_ranked() -> None:
    verified = Verified(torch.arange(3), torch.tensor([[-1], [-1]]), torch.tensor([-2, -2]), torch.tensor([4, 7]))
    outcome = committed(verified, None, None, PLAIN.depth)
    assert outcome.emitted_BD.tolist() == [[4], [7]]
    assert outcome.count_B.tolist() == [[0], [0]]
    assert outcome.rank_BD.tolist() == [[-1], [-1]]
