"""Acceptance in the simulated world: a request walks along recorded ranks of the real head, step by step.

Every simulated request follows one recorded answer from a random token on, so its tokens resemble each other as real
ones do. Tables of doublings advance many requests by many steps of one shape in a few look-ups. ``quality`` moves the
record away from the head that was recorded: above 0 so many misses become hits, below 0 so many hits become misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from specdecode_worker.contract import MAX_RANKS, TreeShape

Array = Any
DEPTH = 8
MOST_STEPS = 127
_BITS = 7
_LEVELS = 0.05
"""Qualities are rounded to this, so that a drift takes few tables."""
_STEPS_OF_MEAN = 48
_MOST_WALKS = 256
"""Walks in memory: each takes 0.3 to 5 MB."""
_LOOKUPS_OF_A_DOUBLING = 64
"""Look-ups of a few requests that take as long as one doubling of a walk."""
VERIFIED = 9
"""Column of the verified draft tokens in the sums of a trimmed chain."""
BESIDE = 9
"""First column of a walk's sums that counts below siblings; chains have none."""
Path = tuple[int, ...]
"""Ranks from the root down to a node."""


class Trim(NamedTuple):
    """Choice of the verified length of each draft by its confidence: that of most tokens a second of the batch."""

    slope: float
    intercepts: tuple[float, ...]
    """Of the logistic model of acceptance, by depth."""
    other_tokens: float
    """Tokens of a step of the other requests."""
    costs: tuple[float, ...]
    """Relative time of a step by the verified draft tokens of this request."""


@dataclass(frozen=True, slots=True)
class Form:
    """A tree shape as the walks need it; one instance a shape, so that it is cheap as a key."""

    parents: tuple[int, ...]
    nodes: int
    depth: int
    trim: Trim | None = field(default=None, kw_only=True)
    """Set for a drafted chain that is not verified to its end."""
    shape: TreeShape = field(compare=False, repr=False)


@lru_cache(maxsize=256)
def form_of(parents: tuple[int, ...]) -> Form:
    shape = TreeShape(parents)
    return Form(parents, shape.nodes, shape.depth, shape)


def chain(depth: int) -> Form:
    return form_of(tuple(range(depth)))


PLAIN = chain(0)


@dataclass(slots=True)
class Walk:
    """``jump[b][i]`` is the root after 2^b steps from root i; ``sums[b][i]`` adds up over those steps: in columns 0..7
    the roots whose main path was right for 1..8 tokens or more, in column 8 the accepted tokens. Those of a tree go on
    with a pair for each of the depths 2..8: accepted parents beside the main path that have children, and those of them
    whose first child was right. Doublings are made once they pay.
    """

    jump: list[Array]
    sums: list[Array]
    _looked_up: int = 0
    """Look-ups since the last doubling was made."""

    def advance(self, roots: Array, steps: int) -> tuple[Array, Array]:
        """(roots afterwards [n], sums [n, 9 or 23]) of at most MOST_STEPS steps."""
        assert steps, "a walk of no steps"
        if self._looked_up >= _LOOKUPS_OF_A_DOUBLING and len(self.jump) < _BITS:
            self._looked_up = 0
            self.sums.append(self.sums[-1] + self.sums[-1].take(self.jump[-1], axis=0))
            self.jump.append(self.jump[-1].take(self.jump[-1]))
        last = len(self.jump) - 1
        bits = [bit for bit in range(last) if steps >> bit & 1] + [last] * (steps >> last)
        self._looked_up += len(bits)
        total = self.sums[bits[0]].take(roots, axis=0)
        roots = self.jump[bits[0]].take(roots)
        for bit in bits[1:]:
            total += self.sums[bit].take(roots, axis=0)
            roots = self.jump[bit].take(roots)
        return roots, total

    def advance_to(self, roots: Array, tokens: Array, most: int) -> tuple[Array, Array]:
        """(steps until each root brought so many tokens, at most ``most`` [n], sums of these steps [n, 9 or 23])."""
        last = len(self.jump) - 1
        bits = [last] * (most >> last) + [*reversed(range(last))]
        self._looked_up += len(bits)
        steps, total = np.zeros_like(tokens), np.zeros((len(roots), self.sums[0].shape[1]), dtype=np.int16)
        for bit in bits:
            longer = total + self.sums[bit].take(roots, axis=0)
            is_before = steps + (1 << bit) + longer[:, 8] < tokens
            steps += is_before << bit
            total[is_before] = longer[is_before]
            roots = np.where(is_before, self.jump[bit].take(roots), roots)
        return steps + 1, total + self.sums[0].take(roots, axis=0)


@dataclass(slots=True, eq=False)
class Records:
    """All recorded answers end to end. ``answers`` are the roots where those of a domain begin, with their lengths."""

    ranks: Array
    """[roots, DEPTH], 0-7 or MAX_RANKS."""
    first: Array
    """[roots] index where the answer of this root begins."""
    length: Array
    answers: Mapping[str, tuple[tuple[int, int], ...]]
    confidence: Array
    """[bins, 2] of bins of equal size: probability of the draft's likeliest token, and share that is accepted."""

    @classmethod
    def of(cls, document: Mapping[str, Any], confidence: Sequence[tuple[float, float]] = ()) -> Records:
        """Return the records of a document of benchmarks/record_ranks.py, with bins of confidence."""
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
            confidence=np.array(confidence),
        )

    @lru_cache(maxsize=_MOST_WALKS)
    def walk(self, quality: float, form: Form) -> Walk:
        """Return the walk of requests that run a shape."""
        if form.trim is not None:
            whole = self.walk(quality, replace(form, trim=None)).sums[0]
            verified = self._verified(quality, form.trim)
            columns = [whole[:, :8], np.minimum(whole[:, 8], verified)[:, None], verified[:, None]]
        else:
            ranks = self._of_quality(quality)
            accepted, beside = _accepted(ranks, form)
            columns = [np.cumprod(ranks == 0, axis=1), accepted[:, None], *([] if form.shape.is_chain else [beside])]
        sums = np.concatenate(columns, axis=1, dtype=np.int16)
        return Walk([self._jump(sums[:, 8])], [sums])

    @cache
    def mean_accepted(self, domain: str, quality: float, form: Form) -> float:
        """Accepted tokens of a step, over all requests of a domain by the tokens that they bring."""
        if form.nodes == 0:
            return 0.0
        accepted = _accepted(self._of_quality(quality), form)[0]
        total = sum(accepted[roots] for roots in self._stepped(domain, accepted))
        # Answers end by tokens: one that is accepted more takes fewer steps for as many.
        steps = _STEPS_OF_MEAN / (_STEPS_OF_MEAN + total)
        return float(1 / steps.mean() - 1)

    @cache
    def survival(self, domain: str, quality: float, path: Path) -> float:
        """Return the share of steps in which the target's tokens have the ranks of ``path``, while chains of 3 run."""
        ranks = self._of_quality(quality)
        return float(self._visited(domain, quality)[(ranks[:, : len(path)] == path).all(axis=1)].sum())

    @cache
    def tail_ranks(self, domain: str, quality: float) -> Array:
        """Return how often each rank above 0 is the target's token, by depth: [2, DEPTH, MAX_RANKS + 1].

        The first row is of nodes on the main path, the second of all others.
        """
        ranks, visits = self._of_quality(quality), self._visited(domain, quality)
        main = np.cumprod(np.hstack([np.ones_like(ranks[:, :1]), ranks[:, :-1] == 0]), axis=1, dtype=bool)
        beside = np.cumprod(np.hstack([np.ones_like(ranks[:, :1]), ranks[:, :-1] < MAX_RANKS]), axis=1, dtype=bool)
        parents = np.stack([main, beside & ~main])
        counts = np.array(
            [
                [np.bincount(ranks[:, k], visits * of[:, k], minlength=MAX_RANKS + 1) for k in range(DEPTH)]
                for of in parents
            ]
        )
        counts[..., 0] = 0
        counts[..., MAX_RANKS] += 1e-9
        return counts / counts.sum(axis=-1, keepdims=True)

    def _stepped(self, domain: str, accepted: Array) -> Iterator[Array]:
        """Yield the roots of requests of a domain that start everywhere, step by step."""
        roots = np.concatenate([np.arange(a, a + n, 4) for a, n in self.answers[domain]])
        jump = self._jump(accepted)
        for _ in range(_STEPS_OF_MEAN):
            yield roots
            roots = jump[roots]

    @cache
    def _visited(self, domain: str, quality: float) -> Array:
        """[roots] share of the steps that begin there, while chains of 3 run."""
        accepted = _accepted(self._of_quality(quality), chain(3))[0]
        steps = np.stack(list(self._stepped(domain, accepted)))
        weights = 1 / (_STEPS_OF_MEAN + accepted[steps].sum(axis=0))
        counts = np.bincount(steps.ravel(), np.tile(weights, len(steps)), minlength=len(self.ranks))
        return counts / counts.sum()

    @cache
    def _visited_before(self, domain: str, quality: float) -> Array:
        """[roots] share of the steps that begin there or at an earlier root."""
        shares = self._visited(domain, quality).cumsum()
        return shares / shares[-1]

    def _jump(self, accepted: Array) -> Array:
        """[roots] the root after a step that accepts ``accepted`` tokens."""
        place = np.arange(len(self.ranks)) - self.first
        return (self.first + (place + 1 + accepted) % self.length).astype(np.int32)

    def sample(self, domain: str, quality: float, count: int, generator: Any) -> tuple[Array, Array]:
        """Return log-odds of drafts' likeliest tokens [count, DEPTH], and how many tokens are right [count]."""
        roots = self._visited_before(domain, quality).searchsorted(generator.random(count), side="right")
        right = np.cumprod(self._of_quality(quality)[roots] == 0, axis=1).sum(axis=1)
        return self._log_odds()[self._bins(quality)[roots]], right

    def features(self, quality: float) -> Array:
        """[roots, DEPTH] log-odds of the draft's likeliest token, as those of right and of wrong ones are recorded."""
        return self._log_odds()[self._bins(quality)]

    @cache
    def _log_odds(self) -> Array:
        """[bins] log-odds of the draft's likeliest token."""
        return np.log(self.confidence[:, 0] / (1 - self.confidence[:, 0]))

    @cache
    def _bins(self, quality: float) -> Array:
        """[roots, DEPTH] bin of the draft's confidence, column by column in memory."""
        share = self.confidence[:, 1]
        coins = np.random.default_rng(20261127).random(self.ranks.shape)
        of_hits, of_misses = (np.cumsum(weights) / weights.sum() for weights in (share, 1 - share))
        is_hit = self._of_quality(quality) == 0
        bins = np.where(is_hit, np.searchsorted(of_hits, coins), np.searchsorted(of_misses, coins))
        return np.asfortranarray(np.minimum(bins, len(share) - 1))

    def _verified(self, quality: float, trim: Trim) -> Array:
        """[roots] draft tokens that are verified: as many as bring most tokens a second."""
        bins, others = self._bins(quality), 1 + trim.other_tokens
        survival, tokens, verified = np.ones(len(bins)), np.zeros(len(bins)), np.zeros(len(bins), dtype=np.int16)
        most = np.full(len(bins), others / trim.costs[0])
        for depth, intercept in enumerate(trim.intercepts):
            survival *= (1 / (1 + np.exp(-(trim.slope * self._log_odds() + intercept)))).take(bins[:, depth])
            tokens += survival
            rate = (others + tokens) / trim.costs[depth + 1]
            np.maximum(verified, (rate > most) * np.int16(depth + 1), out=verified)
            np.maximum(most, rate, out=most)
        return verified

    @cache
    def _of_quality(self, quality: float) -> Array:
        """Deterministic: the same coins for every quality, and answers that differ in how much they change."""
        quality = rounded(quality)
        generator = np.random.default_rng(20261121)
        coins = generator.random(self.ranks.shape)
        spread = np.exp(0.25 * generator.standard_normal(len(self.ranks)))[self.first][:, None]
        share = np.clip(abs(quality) * spread, 0.0, 0.98)
        ranks = self.ranks.copy()
        if quality > 0:
            ranks[(ranks != 0) & (coins < share)] = 0
        elif quality < 0:
            ranks[(ranks == 0) & (coins < share)] = MAX_RANKS
        return ranks


def rounded(quality: float) -> float:
    """Return the quality that has tables."""
    return round(round(quality / _LEVELS) * _LEVELS, 4)


def _accepted(ranks: Array, form: Form) -> tuple[Array, Array]:
    """[roots] tokens of the shape that the target accepts: from node to the child that has the rank, while there is;
    and [roots, 14] what is counted below accepted siblings, as in `Walk`.
    """
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(form.parents, start=1):
        children.setdefault(parent, []).append(index)
    width = max((len(nodes) for nodes in children.values()), default=0)
    table = np.zeros((form.nodes + 1, MAX_RANKS + 1), dtype=np.int64)  # 0 is the root: no node leads back to it
    for parent, nodes in children.items():
        table[parent, : len(nodes)] = nodes
    has_children = table[:, 0] > 0
    node, count = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
    alive, is_main = np.ones(len(ranks), dtype=bool), np.ones(len(ranks), dtype=bool)
    beside = np.zeros((len(ranks), 2 * (DEPTH - 1)), dtype=np.int64)
    for level in range(min(form.depth, DEPTH) if width else 0):
        if level:
            reached = alive & ~is_main & has_children[node]
            beside[:, 2 * level - 2], beside[:, 2 * level - 1] = reached, reached & (ranks[:, level] == 0)
        node = np.where(alive, table[node, ranks[:, level]], 0)
        alive, is_main = alive & (node > 0), is_main & (ranks[:, level] == 0)
        count += alive
    return count, beside
