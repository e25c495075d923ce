"""Draft trees by survival: the chance that a node is reached and right, and the best nodes of a given depth.

A node's survival is the product of the chances along its path, so it never rises from a parent to
a child, and the likeliest N nodes are always a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from specdecode_worker.contract import TreeShape

Path = tuple[int, ...]
"""Ranks from the root down to a node."""
Parameter = tuple[int, bool, int]
"""(depth, whether the parent is on the main path, rank): which chance a node multiplies its parent's survival by."""


class Chance(NamedTuple):
    """An estimated probability."""

    p: float
    variance: float


class Node(NamedTuple):
    """One node of a tree that may be drafted."""

    path: Path
    survival: float

    @property
    def order(self) -> tuple[float, int, Path]:
        """Likeliest first; a parent stands before its children, and a better rank before a worse."""
        return -self.survival, len(self.path), self.path


class Rates(NamedTuple):
    """Chances of one task by depth (first index) and rank (second). Chances never rise with the rank."""

    main: tuple[tuple[Chance, ...], ...]
    """Where the path to the parent is rank 0 all along."""
    sibling: tuple[tuple[Chance, ...], ...]

    @property
    def depth(self) -> int:
        return len(self.main)

    @property
    def chain(self) -> tuple[Chance, ...]:
        return tuple(ranks[0] for ranks in self.main)

    def chance(self, parameter: Parameter) -> Chance:
        depth, main, rank = parameter
        return (self.main if main else self.sibling)[depth - 1][rank]

    def survival(self, path: Path) -> float:
        found = 1.0
        for parameter in parameters(path):
            found *= self.chance(parameter).p
        return found


def parameters(path: Path) -> Iterable[Parameter]:
    """The chances that a node's survival is the product of."""
    return ((depth, not any(path[: depth - 1]), rank) for depth, rank in enumerate(path, start=1))


@lru_cache(maxsize=512)
def best_nodes(rates: Rates, *, depth: int, top_k: int, most: int) -> tuple[Node, ...]:
    """The ``most`` likeliest nodes down to ``depth``, likeliest first: every prefix is a tree. Kept, as all that hangs
    on chances and shapes alone: every load of a look asks for the same."""
    found: list[Node] = []
    heap: list[tuple[tuple[float, int, Path], Node]] = []

    def push(path: Path, parent: float) -> None:
        level, main = len(path), not any(path[:-1])
        node = Node(path, parent * rates.chance((level, main, path[-1])).p)
        heapq.heappush(heap, (node.order, node))

    if depth:
        push((0,), 1.0)
    while heap and len(found) < most:
        node = heapq.heappop(heap)[1]
        found.append(node)
        *above, rank = node.path
        if rank + 1 < top_k:
            push((*above, rank + 1), rates.survival(tuple(above)))
        if len(node.path) < depth:
            push((*node.path, 0), node.survival)
    return tuple(found)


@lru_cache(maxsize=32)
def chain_of(depth: int) -> TreeShape:
    """Made once: shapes are validated, and a search asks for the same few all the time."""
    return TreeShape.chain(depth)


@lru_cache(maxsize=256)
def paths_of(shape: TreeShape) -> tuple[Path, ...]:
    """Path of every node, in the order of the shape."""
    ranks = shape.ranks
    found: list[Path] = [()]
    for node, parent in enumerate(shape.parents, start=1):
        found.append((*found[parent], ranks[node]))
    return tuple(found[1:])


def shape_of(paths: Iterable[Path]) -> TreeShape:
    """The tree of these nodes, breadth first, siblings by rank."""
    return _tree(frozenset(paths))


@lru_cache(maxsize=256)
def _tree(paths: frozenset[Path]) -> TreeShape:
    ordered: list[Path] = sorted(paths, key=lambda path: (len(path), path))
    index = {(): 0, **{path: number for number, path in enumerate(ordered, start=1)}}
    return TreeShape(tuple(index[path[:-1]] for path in ordered))


@lru_cache(maxsize=2048)
def expected(rates: Rates, shape: TreeShape) -> float:
    """Tokens of one step: 1 + the sum of survivals."""
    return 1 + sum(rates.survival(path) for path in paths_of(shape))


@lru_cache(maxsize=2048)
def slopes(rates: Rates, shape: TreeShape) -> Mapping[Parameter, float]:
    """Derivative of log expected tokens by each chance that the shape hangs on."""
    found: dict[Parameter, float] = {}
    tokens = expected(rates, shape)
    for path in paths_of(shape):
        survival = rates.survival(path)
        for parameter in parameters(path):
            found[parameter] = found.get(parameter, 0.0) + survival / rates.chance(parameter).p / tokens
    return found
