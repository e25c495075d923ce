"""Draft trees: topology of a shape, shadow nodes, levels that draft each node once, and acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdecode_kernels.step_tables.op import commit
from specdecode_kernels.step_tables.tables import SlotState, StepRows, Verified
from specdecode_worker.contract import MAX_NODES, MAX_RANKS, TreeShape
from specdecode_worker.sampling.trees import PLAIN, Tree, extended, forest_of, tree_of

CPU = torch.device("cpu")


@st.composite
def shapes(draw: Any, most: int = 14) -> TreeShape:
    """Draw a shape of at most ``most`` nodes."""
    parents: list[int] = []
    for node in range(1, draw(st.integers(0, most)) + 1):
        parents.append(draw(st.integers(parents[-1] if parents else 0, node - 1)))
    return TreeShape(tuple(parents))


TREES = st.builds(tree_of, shapes(), st.integers(0, 8))


def path_to(tree: Tree, node: int) -> set[int]:
    """Return the nodes on the path from the root to ``node``."""
    return {node} | (path_to(tree, tree.parents[node]) if node else set())


@given(shapes())
def test_a_tree_agrees_with_its_shape(shape: TreeShape) -> None:
    tree = tree_of(shape)
    assert (tree.depths, tree.ranks) == (shape.depths, shape.ranks)
    assert (tree.depth, tree.drafted_depth, tree.verified) == (shape.depth, shape.depth, shape.nodes + 1)
    assert tree.is_chain == shape.is_chain


@given(TREES)
def test_an_ancestor_mask_holds_the_path_from_the_root_and_nothing_else(tree: Tree) -> None:
    for node, mask in enumerate(tree.ancestors):
        assert mask == sum(1 << other for other in path_to(tree, node))


def test_the_mask_of_the_largest_tree_fits_a_signed_word() -> None:
    masks = tree_of(TreeShape.chain(MAX_NODES)).ancestors
    assert masks[-1] == -1
    assert masks[-2] == (1 << 63) - 1
    assert torch.tensor(masks).dtype == torch.int64


@given(TREES)
def test_the_main_path_is_rank_0_all_along(tree: Tree) -> None:
    path = tree.main_path
    assert all(tree.ranks[node] == 0 for node in path[1:])
    assert [tree.parents[node] for node in path[1:]] == list(path[:-1])
    assert path[-1] not in tree.parents, "the path ends where nothing follows"


@given(shapes(most=20), st.integers(0, 16))
def test_shadow_nodes_extend_the_main_path_and_change_no_verified_node(shape: TreeShape, depth: int) -> None:
    plain, tree = tree_of(shape), tree_of(shape, depth)
    assert tree.parents[: tree.verified] == plain.parents
    assert len(tree.main_path) - 1 == max(len(plain.main_path) - 1, depth)
    assert len(tree.parents) - tree.verified == max(0, depth + 1 - len(plain.main_path))
    assert (tree.depth, tree.main_depth, tree.is_chain) == (plain.depth, plain.main_depth, plain.is_chain)


def test_shadow_nodes_are_limited_by_the_ancestor_mask() -> None:
    assert len(tree_of(TreeShape.levels(8, 6), 16).parents) == 1 + 8 + 48 + 7
    assert tree_of(TreeShape.chain(MAX_NODES), MAX_NODES + 5) == tree_of(TreeShape.chain(MAX_NODES))


@given(st.lists(TREES, min_size=1, max_size=4))
def test_levels_run_every_inner_node_once_and_propose_every_child_once(trees: list[Tree]) -> None:
    forest = forest_of(tuple(trees), CPU)
    inner = sorted((b, node) for b, tree in enumerate(trees) for node in set(tree.parents[1:]))
    children = sorted((b, child) for b, tree in enumerate(trees) for child in range(1, len(tree.parents)))
    rows: list[tuple[int, int]] = []
    proposed: list[tuple[int, int]] = []
    for level in forest.levels:
        rows += zip(level.batch_R.tolist(), level.node_R.tolist(), strict=True)
        proposed += zip(level.child_batch_C.tolist(), level.child_node_C.tolist(), strict=True)
        assert list(level.counts) == [level.batch_R.tolist().count(b) for b in range(len(trees))]
    assert sorted(rows) == inner
    assert sorted(proposed) == children
    assert forest.all_chains == all(tree.is_chain for tree in trees)


@given(st.lists(TREES, min_size=1, max_size=4))
def test_a_level_takes_states_from_parents_and_gives_children_their_rank(trees: list[Tree]) -> None:
    before: list[tuple[int, int]] = [(b, 0) for b in range(len(trees))]
    for depth, level in enumerate(forest_of(tuple(trees), CPU).levels):
        rows = list(zip(level.batch_R.tolist(), level.node_R.tolist(), strict=True))
        for (b, node), source, mask in zip(rows, level.source_R.tolist(), level.ancestors_R.tolist(), strict=True):
            assert before[source] == (b, trees[b].parents[node] if depth else 0)
            assert mask == trees[b].ancestors[node]
        children = zip(
            *(t.tolist() for t in (level.child_batch_C, level.child_node_C, level.child_source_C, level.child_rank_C)),
            strict=True,
        )
        for b, child, source, rank in children:
            assert rows[source] == (b, trees[b].parents[child])
            assert rank == trees[b].ranks[child]
        assert set(level.depth_R.tolist()) == {depth}
        before = rows


def test_a_forest_pads_to_its_widest_verified_tree() -> None:
    forest = forest_of((tree_of(TreeShape.chain(2), 5), PLAIN, tree_of(TreeShape.levels(3))), CPU)
    assert forest.parents_BN.tolist() == [[-1, 0, 1, -1], [-1, -1, -1, -1], [-1, 0, 0, 0]]
    assert (forest.depth, len(forest.levels), forest.all_chains) == (2, 5, False)


def test_the_main_path_is_extended_without_passes() -> None:
    tree = tree_of(TreeShape.parse("tree:2,1"))
    deeper = extended(tree, 4)
    assert deeper.parents == (-1, 0, 0, 1, 2, 3, 5)
    assert (deeper.verified, deeper.depth, deeper.drafted_depth, deeper.main_depth) == (7, 4, 4, 4)
    assert deeper.planned_part.parents == tree.parents
    assert deeper.planned_part.drafted_depth == 2
    assert extended(tree, 2) is tree
    assert tree.planned_part is tree


def test_an_extension_is_bounded() -> None:
    wide = tree_of(TreeShape.parse("tree:8,6"))
    assert len(extended(wide, 16).parents) == MAX_NODES + 1
    assert extended(tree_of(TreeShape.chain(3)), 6) == Tree((-1, 0, 1, 2, 3, 4, 5), 7, planned=4)


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


def unpadded(row: torch.Tensor) -> list[int]:
    """Return the row without its padding."""
    return [value for value in row.tolist() if value != -1]


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
