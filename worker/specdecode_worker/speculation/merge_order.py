"""Order of the candidates of several drafts behind one node: by how often each was right lately.

A candidate is a draft with a rank: the best token of the head, the second best of the lookup, and so on. The rates of a
draft are those of the nodes where it proposes something.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from specdecode_worker.contract import MAX_RANKS

PRIOR_NODES = 16.0
"""Weight of the prior, in nodes: rank r is right with probability 2^-(r + 1), whatever draft proposes it.

Equal rates are ordered by rank and then by draft, so drafts alternate until their rates are known.
"""
MOST_NODES = 512.0
"""Nodes after which all counts of a draft are halved, so that the order follows a change of the traffic."""


class Credit(NamedTuple):
    """Ranks of the tokens that a row emitted in one draft's own order, from the root on.

    ``ranks`` are as in ``Outcome.rank_BD``: MAX_RANKS for a miss, -1 where the draft proposed nothing. ``draft`` is its
    name and ``hash`` its hash.
    """

    draft: str
    hash: str
    ranks: Sequence[int]


class Candidate(NamedTuple):
    """Candidate of a draft: position of the draft among those of a request, and rank in its own order."""

    draft: int
    rank: int


class MergeOrder:
    """Rates of all candidates, by task and by greedy and sampled requests."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, bool, str], list[float]] = {}

    def record(self, task: str, credit: Credit, *, sampled: bool) -> None:
        """Count the ranks of the tokens of one row for a draft."""
        counts = self._counts.setdefault((task, sampled, credit.draft), [0.0] * (MAX_RANKS + 1))
        for rank in credit.ranks:
            if rank >= 0:
                counts[rank] += 1
        if sum(counts) > MOST_NODES:
            counts[:] = [count / 2 for count in counts]

    def order(self, task: str, drafts: Sequence[str], *, sampled: bool) -> list[Candidate]:
        """Return all candidates of the named drafts, that of the highest rate first. Each draft's own order holds."""
        rates = [self._rates(task, draft, sampled=sampled) for draft in drafts]
        candidates = (Candidate(draft, rank) for draft in range(len(drafts)) for rank in range(MAX_RANKS))
        return sorted(candidates, key=lambda one: (-rates[one.draft][one.rank], one.rank, one.draft))

    def retain(self, tasks: Sequence[str]) -> None:
        """Forget the rates of all other tasks."""
        self._counts = {key: counts for key, counts in self._counts.items() if key[0] in tasks}

    def _rates(self, task: str, draft: str, *, sampled: bool) -> list[float]:
        """Return how often the candidates of a draft were right, by rank. A rate is at most that of a better rank."""
        counts = self._counts.get((task, sampled, draft), [0.0] * (MAX_RANKS + 1))
        total = PRIOR_NODES + sum(counts)
        rates = ((PRIOR_NODES / 2 ** (rank + 1) + counts[rank]) / total for rank in range(MAX_RANKS))
        return list(accumulate(rates, min))
