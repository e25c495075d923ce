"""Draft trees of one task: how likely each node is accepted, and the best nodes of a given depth.

A node's survival is the product of the acceptance rates along its path. It never rises from a parent to a child, so the
likeliest nodes are always a tree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from specdecode_operator.planning.estimates import Estimate
from specdecode_worker.contract import TreeShape

Path = tuple[int, ...]
"""Ranks from the root down to a node."""
Position = tuple[int, bool, int]
"""Depth, whether the parent is on the main path (rank 0 all along), and rank: what an acceptance rate depends on."""


class Node(NamedTuple):
    """A node that may be drafted."""

    path: Path
    survival: float

    @property
    def order(self) -> tuple[float, int, Path]:
        """Likeliest first; a parent comes before its children, and a better rank before a worse one."""
        return -self.survival, len(self.path), self.path


@dataclass(frozen=True, slots=True, eq=False)
class TaskAcceptance:
    """Acceptance rates of one task by depth (first index) and rank (second). They never rise with the rank."""

    main: tuple[tuple[Estimate, ...], ...]
    """After a parent on the main path."""
    sibling: tuple[tuple[Estimate, ...], ...]
    """After another parent."""

    def rate(self, position: Position) -> Estimate:
        """Return the acceptance rate at a position, given that the parent was accepted."""
        depth, is_main, rank = position
        return (self.main if is_main else self.sibling)[depth - 1][rank]

    def at_odds(self, factor: float, variance: float) -> TaskAcceptance:
        """Return the rates with the odds of first choices times ``factor``, whose logarithm has this variance.

        Later ranks keep their share of the misses.
        """

        def moved(ranks: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
            first = ranks[0]
            mean = factor * first.odds / (1 + factor * first.odds)
            own = first.variance / (first.mean * (1 - first.mean)) ** 2
            found = [first._replace(mean=mean, variance=max(own, variance) * (mean * (1 - mean)) ** 2)]
            left = (1 - mean) / (1 - first.mean)
            for rate in ranks[1:]:
                found.append(
                    rate._replace(mean=min(found[-1].mean, left * rate.mean), variance=left**2 * rate.variance)
                )
            return tuple(found)

        return TaskAcceptance(tuple(map(moved, self.main)), tuple(map(moved, self.sibling)))

    def has(self, position: Position) -> bool:
        """Return whether a rate is known at a position."""
        depth, is_main, rank = position
        levels = self.main if is_main else self.sibling
        return depth <= len(levels) and rank < len(levels[depth - 1])

    def survival(self, path: Path) -> float:
        """Return the probability that the node at the end of ``path`` is accepted."""
        return math.prod(self.rate(position).mean for position in positions(path))

    @lru_cache(maxsize=1000)  # noqa: B019 - bounded, of estimates that live as long as a poll
    def tokens(self, shape: TreeShape) -> float:
        """Return the expected tokens of one step."""
        return 1 + sum(map(self.survival, paths_of(shape)))

    @lru_cache(maxsize=1000)  # noqa: B019 - bounded, of estimates that live as long as a poll
    def slopes(self, shape: TreeShape) -> Mapping[Position, float]:
        """Return the derivative of log(tokens) by every acceptance rate that the shape depends on."""
        found: defaultdict[Position, float] = defaultdict(float)
        for path in paths_of(shape):
            share = self.survival(path) / self.tokens(shape)
            for position in positions(path):
                found[position] += share / self.rate(position).mean
        return found

    @lru_cache(maxsize=1000)  # noqa: B019 - bounded, of estimates that live as long as a poll
    def best_nodes(self, depth: int, top_k: int, most: int) -> tuple[Node, ...]:
        """Return the ``most`` likeliest nodes down to ``depth``, likeliest first. Every prefix is a tree.

        The tree grows level by level. A node below none of the best of its level is not among the best of all.
        """
        level, found = [Node((), 1.0)], list[Node]()
        for _ in range(depth):
            paths = ((*parent.path, rank) for parent in level for rank in range(top_k))
            level = sorted((Node(path, self.survival(path)) for path in paths), key=lambda node: node.order)[:most]
            found += level
        return tuple(sorted(found, key=lambda node: node.order)[:most])


def positions(path: Path) -> Iterable[Position]:
    """Return the positions along a path, whose acceptance rates its survival is the product of."""
    return ((depth, not any(path[: depth - 1]), rank) for depth, rank in enumerate(path, start=1))


@lru_cache
def chain_of(depth: int) -> TreeShape:
    """Return the chain of ``depth``, cached because shapes are validated."""
    return TreeShape.chain(depth)


@lru_cache
def paths_of(shape: TreeShape) -> tuple[Path, ...]:
    """Return the path of every node, in the order of the shape."""
    found: list[Path] = [()]
    for node, parent in enumerate(shape.parents, start=1):
        found.append((*found[parent], shape.ranks[node]))
    return tuple(found[1:])


@lru_cache(maxsize=1000)
def shape_of(paths: frozenset[Path]) -> TreeShape:
    """Return the tree of these nodes, breadth first, siblings by rank."""
    order: list[Path] = sorted(paths, key=lambda path: (len(path), path))
    index = {(): 0, **{path: number for number, path in enumerate(order, start=1)}}
    return TreeShape(tuple(index[path[:-1]] for path in order))
