"""Credit of the drafts of a step for the tokens that the target chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.step.host_copy import HostCopy, to_host
from specdecode_worker.speculation.merge_order import Credit


@dataclass(frozen=True, slots=True)
class Proposer:
    """Draft that proposed for a row: its name, its hash, and its position among the drafts of the step."""

    name: str
    hash: str
    index: int


@dataclass(frozen=True, slots=True)
class OwnRanks:
    """Ranked tokens of each draft of a step, for the rows of tasks that merge drafts."""

    proposers: dict[int, tuple[Proposer, ...]]
    """Drafts of such a row, by the index of the row."""
    ranked_FBNK: Tensor | None = None
    """Target ids behind every node in each draft's own order; None if one draft alone proposed for all rows."""
    host_copy: HostCopy = field(default_factory=HostCopy)

    def on_host(self) -> OwnRanks:
        """Queue the copy to the host."""
        if self.ranked_FBNK is None:
            return self
        (ranked_FBNK,), host_copy = to_host([self.ranked_FBNK])
        return OwnRanks(self.proposers, ranked_FBNK, host_copy)

    def credit(
        self, row: int, path: Sequence[int], tokens: Sequence[int], ranks: Sequence[int], depth_limit: int
    ) -> tuple[Credit, ...]:
        """Wait for the copy, and return the credit of each draft of a row; empty if its task merges nothing.

        Args:
            row: Index of the row.
            path: Accepted nodes after the root.
            tokens: Emitted tokens: those of the path and the one after it.
            ranks: Ranks of these tokens in the common order.
            depth_limit: Largest number of accepted nodes. The token after a cut counts as a miss.
        """
        proposers = self.proposers.get(row, ())
        if self.ranked_FBNK is None or len(proposers) == 1:
            return tuple(Credit(one.name, one.hash, ranks[: len(tokens)]) for one in proposers)
        self.host_copy.wait()
        nodes = [0, *path[: len(tokens) - 1]]
        credits = []
        for one in proposers:
            ranked_NK = self.ranked_FBNK[one.index, row]
            ranks_D = [_rank(ranked_NK[node].tolist(), token) for node, token in zip(nodes, tokens, strict=True)]
            if len(tokens) > depth_limit and ranks_D[-1] >= 0:
                ranks_D[-1] = MAX_RANKS
            credits.append(Credit(one.name, one.hash, ranks_D))
        return tuple(credits)


def _rank(ranked: Sequence[int], token: int) -> int:
    """Return the rank of a token: MAX_RANKS if it is not among the candidates, -1 without candidates."""
    if ranked[0] < 0:
        return -1
    return ranked.index(token) if token in ranked else MAX_RANKS
