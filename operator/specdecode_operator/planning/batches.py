"""Which batches form when several tasks share a load: their draft passes and verified tokens, and how often.

The deepest shape in a batch decides how many passes a step takes. At sixteen sequences all tasks are in every batch; at
one there is one task at a time, and nobody pays for another's depth. So a step's time is taken over the batches that a
sequence meets, the others in them being drawn by the shares of the running sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    found: list[Met] = []
    for name, shape in shapes:
        met = list(_met(name, shape.depth, shape.nodes, shapes, shares, sequences))
        often = [one for one in met if one.weight >= LEAST_WEIGHT] or met
        total = sum(one.weight for one in often)
        found += [one._replace(weight=one.weight / total) for one in often]
    return found


def _met(
    name: str, own: int, nodes: int, shapes: Shapes, shares: Mapping[str, float], sequences: float
) -> Iterator[Met]:
    """Batches by their deepest shape: all others are no deeper, and one of them is as deep, or this one is."""
    others = max(0.0, sequences - 1)
    below = 0.0
    for depth in sorted({shape.depth for _, shape in shapes if shape.depth >= own}):
        inside = [(shares[task], shape.nodes) for task, shape in shapes if shape.depth <= depth]
        share = min(1.0, sum(weight for weight, _ in inside))
        chance = share**others
        mean = sum(weight * count for weight, count in inside) / share if share > 0 else 0.0
        verified = 1 + (nodes + others * mean) / (1 + others)
        yield Met(name, Batch(depth, round(verified, DIGITS)), chance - below)
        below = chance
