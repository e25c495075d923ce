"""Target hidden states that the loaded drafts read. They are stored together; each draft selects its columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from specdecode_worker.models.configs.target_states import NO_STATES, TargetStates


@dataclass(frozen=True, slots=True)
class StateColumns:
    """Indices of the stored states that a draft reads, each of width ``size``; None for all, in stored order."""

    indices: tuple[int, ...] | None = None
    size: int = 0

    def of(self, aux_TA: Tensor) -> Tensor:
        """Select the states of the draft from the stored ones, [tokens, width]."""
        if self.indices is None:
            return aux_TA
        states_TSH = aux_TA.view(len(aux_TA), -1, self.size)
        # Single selections, because a list as index would be copied to the device.
        return torch.cat([states_TSH[:, index] for index in self.indices], dim=1)


def union_reads(reads: Iterable[TargetStates]) -> TargetStates:
    """Return the union of the states that several drafts read.

    If all drafts read the same states, their order is preserved, so that no selection is needed.
    """
    distinct = {one for one in reads if one}
    return distinct.pop() if len(distinct) == 1 else reduce(TargetStates.__or__, distinct, NO_STATES)


def columns_of(one: TargetStates, among: TargetStates, size: int) -> StateColumns:
    """Return the columns of the states ``one`` among the stored states ``among``."""
    return StateColumns() if one == among else StateColumns(among.indices_of(one), size)
