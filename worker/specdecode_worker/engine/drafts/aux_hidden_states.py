"""The target's states that the loaded drafts read: all of them are kept together, each draft takes its own columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from specdecode_worker.models.configs.target_states import NOTHING, Reads


@dataclass(frozen=True, slots=True)
class Columns:
    """Which of the kept states, each ``size`` wide, a draft reads; None is all of them as they are."""

    picks: tuple[int, ...] | None = None
    size: int = 0

    def of(self, aux_TA: Tensor) -> Tensor:
        if self.picks is None:
            return aux_TA
        return aux_TA.view(len(aux_TA), -1, self.size)[:, list(self.picks)].flatten(1)


def joined(reads: Iterable[Reads]) -> Reads:
    """All that some draft reads, each state once. What a single draft reads keeps its order, and needs no picking."""
    found = {one for one in reads if one}
    return found.pop() if len(found) == 1 else reduce(Reads.__or__, found, NOTHING)


def columns(one: Reads, among: Reads, size: int) -> Columns:
    """Where ``one``'s states stand among the kept ones."""
    return Columns() if one == among else Columns(among.picks(one), size)
