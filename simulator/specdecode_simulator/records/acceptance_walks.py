"""Acceptance in the simulated world: a request walks along recorded ranks of the real head, step by step.

Every simulated request follows one recorded answer from a random token on, so its tokens resemble each other as real
ones do. Tables of doublings advance many requests by many steps of one shape in a few look-ups. ``quality`` moves the
record away from the head that was recorded: above 0 so many misses become hits, below 0 so many hits become misses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from specdecode_worker.contract import MAX_RANKS, TreeShape

Array = Any
DEPTH = 8
MOST_STEPS = 127
_BITS = 7
_LEVELS = 0.05
"""Qualities are rounded to this, so that a drift takes few tables."""
_STEPS_OF_MEAN = 48


@dataclass(frozen=True, slots=True)
class Form:
    """A tree shape as the walks need it; one instance a shape, so that it is cheap as a key."""

    parents: tuple[int, ...]
    nodes: int
    depth: int
    shape: TreeShape = field(compare=False, repr=False)


@lru_cache(maxsize=256)
def form_of(parents: tuple[int, ...]) -> Form:
    shape = TreeShape(parents)
    return Form(parents, shape.nodes, shape.depth, shape)


def chain(depth: int) -> Form:
    return form_of(tuple(range(depth)))


PLAIN = chain(0)


@dataclass(frozen=True, slots=True)
class Walk:
    """``jump[b][i]`` is the root after 2^b steps from root i; ``sums[b][i]`` adds up over those steps: in columns 0..7
    the roots whose main path was right for 1..8 tokens or more, in column 8 the accepted tokens.
    """

    jump: tuple[Array, ...]
    sums: tuple[Array, ...]

    def advance(self, roots: Array, steps: int) -> tuple[Array, Array]:
        """(roots afterwards [n], sums [n, 9]) of at most MOST_STEPS steps."""
        total = None
        for bit in range(_BITS):
            if steps >> bit & 1:
                added = self.sums[bit][roots]
                total = added if total is None else total + added
                roots = self.jump[bit][roots]
        assert total is not None, "a walk of no steps"
        return roots, total


@dataclass(slots=True)
class Records:
    """All recorded answers end to end. ``starts`` are the roots where answers of a domain begin, with their lengths."""

    ranks: Array
    """[roots, DEPTH], 0-7 or MAX_RANKS."""
    first: Array
    """[roots] index where the answer of this root begins."""
    length: Array
    answers: Mapping[str, tuple[tuple[int, int], ...]]
    _qualities: dict[float, Array] = field(default_factory=dict)
    _walks: dict[tuple[float, Form], Walk] = field(default_factory=dict)
    _means: dict[tuple[str, float, Form], float] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Records:
        """Return the records of a document of benchmarks/record_ranks.py."""
        blocks, begin = [], 0
        answers: dict[str, list[tuple[int, int]]] = {}
        for answer in document["answers"]:
            block = np.array([[int(digit) for digit in word] for word in answer["ranks"][:DEPTH]], dtype=np.int8).T
            blocks.append(block)
            answers.setdefault(answer["domain"], []).append((begin, len(block)))
            begin += len(block)
        lengths = [len(block) for block in blocks]
        firsts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
        return cls(
            ranks=np.concatenate(blocks),
            first=np.repeat(firsts, lengths),
            length=np.repeat(lengths, lengths),
            answers={domain: tuple(spans) for domain, spans in answers.items()},
        )

    def walk(self, quality: float, form: Form) -> Walk:
        key = (_rounded(quality), form)
        if key not in self._walks:
            self._walks[key] = self._made(*key)
        return self._walks[key]

    def mean_accepted(self, domain: str, quality: float, form: Form) -> float:
        """Accepted tokens of a step, over all requests of a domain by the tokens that they bring."""
        key = (domain, _rounded(quality), form)
        if form.nodes == 0:
            return 0.0
        if key not in self._means:
            roots = np.concatenate([np.arange(a, a + n, 4) for a, n in self.answers[domain]])
            _, sums = self.walk(quality, form).advance(roots, _STEPS_OF_MEAN)
            # Answers end by tokens: one that is accepted more takes fewer steps for as many.
            steps = _STEPS_OF_MEAN / (_STEPS_OF_MEAN + sums[:, 8])
            self._means[key] = float(1 / steps.mean() - 1)
        return self._means[key]

    def tail_ranks(self, domain: str) -> Array:
        """[DEPTH, MAX_RANKS + 1] how a rank that is not 0 is distributed, by depth."""
        rows = np.concatenate([np.arange(a, a + n) for a, n in self.answers[domain]])
        ranks = self.ranks[rows]
        counts = np.array([np.bincount(ranks[:, k], minlength=MAX_RANKS + 1) for k in range(DEPTH)], dtype=float)
        counts[:, 0] = 0
        counts[:, MAX_RANKS] += 1e-9
        return counts / counts.sum(axis=1, keepdims=True)

    def _made(self, quality: float, form: Form) -> Walk:
        ranks = self._of_quality(quality)
        runs = (np.cumprod(ranks == 0, axis=1)).astype(np.int32)
        accepted = _accepted(ranks, form)
        place = np.arange(len(ranks)) - self.first
        jump = self.first + (place + 1 + accepted) % self.length
        sums = np.concatenate([runs, accepted[:, None].astype(np.int32)], axis=1)
        jumps, totals = [jump], [sums]
        for _ in range(_BITS - 1):
            totals.append(totals[-1] + totals[-1][jumps[-1]])
            jumps.append(jumps[-1][jumps[-1]])
        return Walk(tuple(jumps), tuple(totals))

    def _of_quality(self, quality: float) -> Array:
        """Deterministic: the same coins for every quality, and answers that differ in how much they change."""
        if quality not in self._qualities:
            generator = np.random.default_rng(20261121)
            coins = generator.random(self.ranks.shape)
            spread = np.exp(0.25 * generator.standard_normal(len(self.ranks)))[self.first][:, None]
            share = np.clip(abs(quality) * spread, 0.0, 0.98)
            ranks = self.ranks.copy()
            if quality > 0:
                ranks[(ranks != 0) & (coins < share)] = 0
            elif quality < 0:
                ranks[(ranks == 0) & (coins < share)] = MAX_RANKS
            self._qualities[quality] = ranks
        return self._qualities[quality]


def _rounded(quality: float) -> float:
    return round(round(quality / _LEVELS) * _LEVELS, 4)


def _accepted(ranks: Array, form: Form) -> Array:
    """[roots] tokens of the shape that the target accepts: from node to the child that has the rank, while there is."""
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(form.parents, start=1):
        children.setdefault(parent, []).append(index)
    width = max((len(nodes) for nodes in children.values()), default=0)
    table = np.zeros((form.nodes + 1, MAX_RANKS + 1), dtype=np.int64)  # 0 is the root: no node leads back to it
    for parent, nodes in children.items():
        table[parent, : len(nodes)] = nodes
    node, count = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
    alive = np.ones(len(ranks), dtype=bool)
    for level in range(min(form.depth, DEPTH) if width else 0):
        node = np.where(alive, table[node, ranks[:, level]], 0)
        alive = alive & (node > 0)
        count += alive
    return count
