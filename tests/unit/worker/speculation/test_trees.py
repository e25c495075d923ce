"""Tests of draft trees: topology of a shape, shadow nodes, and levels that draft each node once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import MAX_NODES, TreeShape
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


@pytest.mark.parametrize(("text", "chains"), [("chain:3", True), ("none", True), ("0,0", False)])
def test_all_chains_only_when_nothing_branches(text: str, chains: bool) -> None:
    assert forest_of((tree_of(TreeShape.parse(text), 4), PLAIN), CPU).all_chains is chains


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
