"""Which batches form when several tasks share a load: their draft passes and verified tokens, and how often.

The deepest shape in a batch decides how many passes a step takes. At sixteen sequences all tasks are in every batch; at
one there is one task at a time, and nobody pays for another's depth. So a step's time is taken over the batches that a
sequence meets, the others in them being drawn by the shares of the running sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from specdecode_operator.planning.situation import Shapes

LEAST_WEIGHT = 0.02
"""Batches that a task meets more seldom are left out: they cost a prediction each and move nothing."""
DIGITS = 1
"""Of verified tokens a sequence: batches that are nearer have one time."""


class Batch(NamedTuple):
    """What a step of one sort of batch does."""

    passes: int
    verified: float
    """Tokens a sequence, the root included; the mean over the batch."""


class Met(NamedTuple):
    """A sequence of ``task`` finds itself in such a batch in this share of its steps."""

    task: str
    batch: Batch
    weight: float


def batches(shapes: Shapes, shares: Mapping[str, float], sequences: float) -> list[Met]:
    """By task; the weights of each task sum to 1."""
    others = max(0.0, sequences - 1)
    found: list[Met] = []
    sizes = [(shape.depth, shape.nodes, shares[task]) for task, shape in shapes]
    bounds = [_no_deeper(depth, sizes, others) for depth in sorted({depth for depth, _, _ in sizes})]
    for (name, _), (depth, nodes, _) in zip(shapes, sizes, strict=True):
        met = list(_met(name, depth, nodes, bounds, others))
        often = [one for one in met if one.weight >= LEAST_WEIGHT] or met
        total = sum(one.weight for one in often)
        found += [Met(one.task, one.batch, one.weight / total) for one in often]
    return found


class _Bound(NamedTuple):
    """The others of a sequence, as far as they are no deeper than ``depth``."""

    depth: int
    chance: float
    """That all of them are."""
    nodes: float
    """Of one of them, on average."""


def _no_deeper(depth: int, sizes: Iterable[tuple[int, int, float]], others: float) -> _Bound:
    inside = [(share, nodes) for other, nodes, share in sizes if other <= depth]
    share = min(1.0, sum(weight for weight, _ in inside))
    mean = sum(weight * count for weight, count in inside) / share if share > 0 else 0.0
    return _Bound(depth, share**others, mean)


def _met(name: str, own: int, nodes: int, bounds: Iterable[_Bound], others: float) -> Iterator[Met]:
    """Batches by their deepest shape: all others are no deeper, and one of them is as deep, or this one is."""
    below = 0.0
    for bound in bounds:
        if bound.depth >= own:
            verified = 1 + (nodes + others * bound.nodes) / (1 + others)
            yield Met(name, Batch(bound.depth, round(verified, DIGITS)), bound.chance - below)
            below = bound.chance
