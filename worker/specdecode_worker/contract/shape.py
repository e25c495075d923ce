"""Draft trees as lists of parents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pydantic import ConfigDict, RootModel, field_validator, model_validator

from specdecode_worker.contract.wire import MAX_NODES


class TreeShape(RootModel[tuple[int, ...]]):
    """Shape of a draft tree: the parents of its nodes, in breadth-first order.

    Node 0 is the root, the last committed token. It is not listed, and counts in neither depth nor nodes. Entry i is
    the parent of node i + 1. A chain is a tree of width 1; an empty list means plain decoding. Children of one parent
    are ordered by rank: the first child is the draft's best token, the second its second best.

    Text form: ``none``, ``chain:5``, ``tree:4,2,1`` (children per node, level by level), or ``0,0,1`` (the parents).
    """

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return _parents_of_text(value) if isinstance(value, str) else value

    @field_validator("root")
    @classmethod
    def _check(cls, parents: tuple[int, ...]) -> tuple[int, ...]:
        if len(parents) > MAX_NODES:
            raise ValueError(f"a tree has at most {MAX_NODES} nodes, this one has {len(parents)}")
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} names parent {parent}; a parent comes before its children")
        if list(parents) != sorted(parents):
            raise ValueError("nodes must be listed in breadth-first order (parents never decrease)")
        return parents

    @classmethod
    def chain(cls, depth: int) -> TreeShape:
        """Return a chain of ``depth`` nodes."""
        return cls(tuple(range(depth)))

    @classmethod
    def levels(cls, *children: int) -> TreeShape:
        """Return the tree in which every node of level i has ``children[i]`` children.

        Raises:
            ValueError: a width is below 1, or the tree exceeds MAX_NODES.
        """
        if any(width < 1 for width in children):
            raise ValueError(f"every level of a tree needs at least one child per node, got {children}")
        parents: list[int] = []
        level = [0]
        for width in children:
            first = len(parents) + 1
            parents += [parent for parent in level for _ in range(width)]
            if len(parents) > MAX_NODES:
                raise ValueError(f"a tree has at most {MAX_NODES} nodes, {children} has more")
            level = list(range(first, len(parents) + 1))
        return cls(tuple(parents))

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Parse the text form. Raise pydantic.ValidationError if it is invalid."""
        return cls.model_validate(text)

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node except the root."""
        return self.root

    @property
    def nodes(self) -> int:
        """Number of nodes without the root."""
        return len(self.root)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node, starting with the root's 0."""
        return _depths(self.root)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return self.depths[-1]  # in breadth-first order the last node is the deepest

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every node among its siblings, starting with the root's 0."""
        seen: dict[int, int] = {}
        ranks = [0]
        for parent in self.root:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    @property
    def is_chain(self) -> bool:
        """True if every node has at most one child."""
        return self.root == tuple(range(len(self.root)))

    def children(self, node: int) -> Iterator[int]:
        """Return the children of ``node``, best rank first."""
        return (child for child, parent in enumerate(self.root, start=1) if parent == node)

    def __eq__(self, other: object) -> bool:
        """Compare the parents only.

        This is faster than pydantic's comparison; the planner uses shapes as dictionary keys.
        """
        return isinstance(other, TreeShape) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        if not self.root:
            return "none"
        return f"chain:{self.nodes}" if self.is_chain else ",".join(map(str, self.root))


@lru_cache(maxsize=512)
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the depths of all nodes.

    Cached, because a planner cycle needs the depths of the same few shapes thousands of times.
    """
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return tuple(depths)


def _parents_of_text(text: str) -> tuple[int, ...]:
    kind, _, rest = text.strip().partition(":")
    try:
        if text.strip() in ("", "none"):
            return ()
        if kind == "chain":
            return tuple(range(int(rest)))
        if kind == "tree":
            return TreeShape.levels(*map(int, rest.split(","))).root
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no tree shape ({error}); write none, chain:5, tree:4,2,1 or a list of parents"
        ) from None
