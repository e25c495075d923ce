"""Draft trees as the engine runs them: a shape's topology in the forms that drafting, packing and accepting need.

All of it depends on shapes alone, so it is made once per combination of shapes in a batch and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_NODES, TreeShape
from specdecode_worker.speculation.sampling.row_selection import Nodes


@dataclass(frozen=True)
class Tree:
    """Parents of all nodes, the root's -1 first. Nodes up to ``verified`` (the root included) go through the target;
    those behind are drafted in the shadow, only to be scored against the tokens that come out later."""

    parents: tuple[int, ...]
    verified: int

    @cached_property
    def depths(self) -> tuple[int, ...]:
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
        """Bit mask per node: the nodes on its path from the root, itself included (63 is a sign bit, and fits)."""
        masks = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            masks.append(masks[parent] | 1 << node)
        return tuple(mask - (1 << 64) if mask >> 63 else mask for mask in masks)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Per node, the nodes from below the root to it, itself included."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def main_path(self) -> tuple[int, ...]:
        """Nodes of rank 0 all along, from the root."""
        path = [0]
        while path[-1] in self.parents[1:]:
            path.append(self.parents.index(path[-1], 1))
        return tuple(path)

    @cached_property
    def expanded(self) -> tuple[tuple[int, ...], ...]:
        """Per depth, the nodes that have children: what each draft pass runs."""
        inner = sorted(set(self.parents[1:]))
        return tuple(tuple(node for node in inner if self.depths[node] == depth) for depth in range(self.drafted_depth))

    @cached_property
    def drafted_depth(self) -> int:
        """Draft passes of this tree."""
        return max(self.depths)

    @cached_property
    def depth(self) -> int:
        """Depth of what is verified."""
        return max(self.depths[: self.verified])

    @cached_property
    def main_depth(self) -> int:
        """Depth to which the main path is verified."""
        return sum(node < self.verified for node in self.main_path) - 1

    @cached_property
    def is_chain(self) -> bool:
        return self.parents[: self.verified] == tuple(range(-1, self.verified - 1))


PLAIN = Tree((-1,), 1)


@lru_cache(maxsize=1024)
def tree_of(shape: TreeShape, shadow_depth: int = 0) -> Tree:
    """The tree of a shape, its main path drafted on, in the shadow, to ``shadow_depth`` where there is room."""
    plain = Tree((-1, *shape.parents), shape.nodes + 1)
    parents = list(plain.parents)
    tip = plain.main_path[-1]
    for _ in range(min(shadow_depth - len(plain.main_path) + 1, MAX_NODES + 1 - len(parents))):
        parents.append(tip)
        tip = len(parents) - 1
    return Tree(tuple(parents), plain.verified)


@dataclass(frozen=True, slots=True)
class Level:
    """One draft pass over a batch of trees: its R rows (``batch_R``, ``node_R``), whence their hidden states come
    (``source_R`` indexes the rows of the pass before), and the C children that they propose."""

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
        return Nodes(self.batch_R, self.node_R, self.depth_R)


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of a batch as tensors. ``parents_BN`` is -1 for roots and padding; N is the widest verified tree."""

    trees: tuple[Tree, ...]
    levels: tuple[Level, ...]
    parents_BN: Tensor
    depth: int
    all_chains: bool


@lru_cache(maxsize=256)
def forest_of(trees: tuple[Tree, ...], device: torch.device) -> Forest:
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
def paths_of(trees: tuple[Tree, ...], device: torch.device) -> Tensor:
    """[B, N, D] the nodes below the root on the path to every node, itself included, padded with the root's 0; N
    counts shadow nodes too."""
    nodes = max(len(tree.parents) for tree in trees)
    depth = max(tree.drafted_depth for tree in trees)
    rows = [
        [[*path, *[0] * (depth - len(path))] for path in (*tree.paths, *[()] * (nodes - len(tree.parents)))]
        for tree in trees
    ]
    return to_device(rows, device, dtype=torch.int64).view(len(trees), nodes, depth)


def _level(trees: tuple[Tree, ...], depth: int, device: torch.device) -> Level:
    rows = _rows(trees, depth)
    before = {row: index for index, row in enumerate(_rows(trees, depth - 1))} if depth else {}
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


def _rows(trees: tuple[Tree, ...], depth: int) -> list[tuple[int, int]]:
    return [(b, node) for b, tree in enumerate(trees) if depth < tree.drafted_depth for node in tree.expanded[depth]]
