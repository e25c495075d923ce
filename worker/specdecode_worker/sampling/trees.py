"""Trees and forests of drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_NODES, TreeShape


@dataclass(frozen=True, slots=True)
class Nodes:
    """Positions of R rows of logits: sequence of the batch, node of its tree, and depth of the node."""

    batch_R: Tensor
    node_R: Tensor
    depth_R: Tensor


# Draft trees: the topology of a shape in the forms that drafting, packing and acceptance need.
#
# Everything here depends on shapes alone, so it is built once per combination of shapes in a batch and cached.


@dataclass(frozen=True)
class Tree:
    """Topology of one draft tree. Node 0 is the root, and parents precede their children.

    ``parents`` holds the parent of each node, -1 for the root. The first ``verified`` nodes (the root included) go
    through the target. The nodes after them are shadow nodes: they are drafted only to be scored against tokens emitted
    later. The nodes of a tree with ``given`` tokens are not drafted: the tokens are known before the step. Drafts that
    need passes propose behind the first ``planned`` nodes only (None: behind all), see `extended`.
    """

    parents: tuple[int, ...]
    verified: int
    given: bool = False
    planned: int | None = None

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has depth 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its siblings."""
        return tuple(sum(other == parent for other in self.parents[:node]) for node, parent in enumerate(self.parents))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bit mask per node: the nodes on its path from the root, the node and the root included.

        Bit 63 is the sign bit of an int64, so the mask is negative where that bit is set.
        """
        masks = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            masks.append(masks[parent] | 1 << node)
        return tuple(mask - (1 << 64) if mask >> 63 else mask for mask in masks)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Nodes on the path to each node, without the root and with the node itself."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def main_path(self) -> tuple[int, ...]:
        """Nodes of the path that has rank 0 at every depth, from the root."""
        path = [0]
        while path[-1] in self.parents[1:]:
            path.append(self.parents.index(path[-1], 1))
        return tuple(path)

    @cached_property
    def expanded(self) -> tuple[tuple[int, ...], ...]:
        """Nodes that have children, by depth: the rows of each draft pass."""
        inner = sorted(set(self.parents[1:]))
        return tuple(tuple(node for node in inner if self.depths[node] == depth) for depth in range(self.drafted_depth))

    @cached_property
    def drafted_depth(self) -> int:
        """Number of levels of this tree that are drafted."""
        return 0 if self.given else max(self.depths)

    @cached_property
    def planned_part(self) -> Tree:
        """Part of the tree that drafts with passes propose for."""
        return self if self.planned is None else Tree(self.parents[: self.planned], self.planned)

    @cached_property
    def depth(self) -> int:
        """Depth of the verified part."""
        return max(self.depths[: self.verified])

    @cached_property
    def main_depth(self) -> int:
        """Depth to which the main path is verified."""
        return sum(node < self.verified for node in self.main_path) - 1

    @cached_property
    def is_chain(self) -> bool:
        """True if the verified part is a chain."""
        return self.parents[: self.verified] == tuple(range(-1, self.verified - 1))


PLAIN = Tree((-1,), 1)
"""Tree of plain decoding: the root alone."""


@lru_cache(maxsize=64)
def given_chain(tokens: int) -> Tree:
    """Build the chain of ``tokens`` nodes whose tokens are known before the step."""
    return Tree(tuple(range(-1, tokens)), tokens + 1, given=True)


@lru_cache(maxsize=1024)
def tree_of(shape: TreeShape, shadow_depth: int = 0) -> Tree:
    """Build the tree of a shape and extend its main path by shadow nodes to depth ``shadow_depth``.

    The extension is shorter if the tree would exceed MAX_NODES nodes below the root.
    """
    plain = Tree((-1, *shape.parents), shape.nodes + 1)
    parents = list(plain.parents)
    tip = plain.main_path[-1]
    for _ in range(min(shadow_depth - len(plain.main_path) + 1, MAX_NODES + 1 - len(parents))):
        parents.append(tip)
        tip = len(parents) - 1
    return Tree(tuple(parents), plain.verified)


@lru_cache(maxsize=1024)
def extended(tree: Tree, depth: int) -> Tree:
    """Extend the main path of a tree without shadow nodes to ``depth`` by nodes that need no draft pass.

    The extension is verified. It is shorter if the tree would exceed MAX_NODES nodes below the root.
    """
    planned = len(tree.parents)
    assert tree.verified == planned, "a tree with shadow nodes is not extended"
    tips = (tree.main_path[-1], *range(planned, MAX_NODES))[: max(depth + 1 - len(tree.main_path), 0)]
    parents = tree.parents + tips
    return Tree(parents, len(parents), planned=planned) if tips else tree


def all_nodes(count: int) -> int:
    """Return the bit mask of ``count`` nodes, at most 64, as an int64."""
    return -1 if count == 64 else (1 << count) - 1


@dataclass(frozen=True, slots=True)
class Level:
    """Rows of one draft pass over a batch of trees.

    The pass has R rows: node ``node_R`` of sequence ``batch_R``. ``source_R`` is the row of the previous pass that
    holds the hidden state of the parent; in the first pass it is the sequence. ``counts`` is the number of rows per
    tree. The rows propose C children: ``child_source_C`` is the row of a child's parent in this pass, ``child_rank_C``
    the child's rank among its siblings.
    """

    counts: tuple[int, ...]
    batch_R: Tensor
    node_R: Tensor
    depth_R: Tensor
    ancestors_R: Tensor
    source_R: Tensor
    child_batch_C: Tensor
    child_node_C: Tensor
    child_source_C: Tensor
    child_rank_C: Tensor

    @property
    def nodes(self) -> Nodes:
        """Positions of the rows in the forest."""
        return Nodes(self.batch_R, self.node_R, self.depth_R)


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees of a batch as tensors.

    ``parents_BN`` is -1 for roots and padding; N is the number of nodes of the widest verified tree. ``depth`` is the
    largest verified depth.
    """

    trees: tuple[Tree, ...]
    levels: tuple[Level, ...]
    parents_BN: Tensor
    depth: int
    all_chains: bool


@lru_cache(maxsize=256)
def forest_of(trees: tuple[Tree, ...], device: torch.device) -> Forest:
    """Build the forest of a batch of trees on ``device``."""
    widest = max(tree.verified for tree in trees)
    padded = [[*tree.parents[: tree.verified], *[-1] * (widest - tree.verified)] for tree in trees]
    levels = tuple(_level(trees, depth, device) for depth in range(max(tree.drafted_depth for tree in trees)))
    return Forest(
        trees=trees,
        levels=levels,
        parents_BN=to_device(padded, device),
        depth=max(tree.depth for tree in trees),
        all_chains=all(tree.is_chain for tree in trees),
    )


@lru_cache(maxsize=256)
def ancestors_of(trees: tuple[Tree, ...], device: torch.device) -> Tensor:
    """Return the bit masks of `Tree.ancestors` of every node, [B, N], padded with 0. N includes shadow nodes."""
    nodes = max(len(tree.parents) for tree in trees)
    return to_device([[*tree.ancestors, *[0] * (nodes - len(tree.parents))] for tree in trees], device)


def _level(trees: tuple[Tree, ...], depth: int, device: torch.device) -> Level:
    """Build the draft pass that expands the nodes of ``depth``."""
    rows = rows_at(trees, depth)
    before = {row: index for index, row in enumerate(rows_at(trees, depth - 1))} if depth else {}
    at = {row: index for index, row in enumerate(rows)}
    children = [
        (b, child, at[b, parent], tree.ranks[child])
        for b, tree in enumerate(trees)
        for child, parent in enumerate(tree.parents)
        if (b, parent) in at
    ]

    def column(values: list[int]) -> Tensor:
        return to_device(values, device, dtype=torch.int64)

    return Level(
        counts=tuple(len(tree.expanded[depth]) if depth < tree.drafted_depth else 0 for tree in trees),
        batch_R=column([b for b, _ in rows]),
        node_R=column([node for _, node in rows]),
        depth_R=column([depth for _ in rows]),
        ancestors_R=column([trees[b].ancestors[node] for b, node in rows]),
        source_R=column([before[b, trees[b].parents[node]] if depth else b for b, node in rows]),
        child_batch_C=column([b for b, *_ in children]),
        child_node_C=column([child for _, child, *_ in children]),
        child_source_C=column([source for *_, source, _ in children]),
        child_rank_C=column([rank for *_, rank in children]),
    )


def rows_at(trees: Sequence[Tree], depth: int) -> list[tuple[int, int]]:
    """Return (sequence, node) of every node of ``depth`` that has children, in the order of `Level`."""
    return [(b, node) for b, tree in enumerate(trees) if depth < tree.drafted_depth for node in tree.expanded[depth]]
