"""Drafter of Medusa heads (Cai et al., arXiv 2401.10774), which propose all depths in one pass.

Head d reads the target's final hidden state at the token before the root, and proposes the tokens of depth d + 1
independently of those of other depths. A tree therefore costs one pass, and all nodes of one depth have the same
children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.core.batch import Row
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.base import DraftContext, Drafter, DraftMethod, Expand, Ranking
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Forest, Level


class Heads(Protocol):
    """Interface of Medusa heads."""

    @property
    def reads(self) -> TargetStates:
        """Target states that the heads read: the final hidden state."""
        ...

    def logits(self, hidden_BE: Tensor) -> Tensor:
        """Return the logits of every head, [heads, B, V], for final hidden states."""
        ...


class MedusaDrafter(Drafter):
    """Drafter of the method medusa.

    Acceptance is exact, as for other methods; the typical acceptance of the paper would change the text.
    """

    def __init__(
        self, heads: Heads, target_ids: Tensor | None, state: DeviceState, sharpness: Sequence[float] = ()
    ) -> None:
        """Create a drafter. ``target_ids`` and ``sharpness`` are as for Ranking."""
        self.reads = heads.reads
        self._heads, self._state = heads, state
        self._ranking = Ranking(target_ids, sharpness)

    def ready(self, request: Request) -> bool:
        """Return whether the ring holds the target state that the heads need."""
        return request.cached_min > self.progress(request).features_from

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Do nothing; Medusa heads have no cache to fill."""

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Run the heads, and return the function that proposes tokens."""
        if not forest.levels:
            return None
        slots_B = to_device([row.request.slot for row in rows], self._state.length_S.device)
        parents_B = (self._state.length_S[slots_B] - 1).clamp(min=0)
        logits_DBV = self._heads.logits(self.columns.of(self._state.aux(slots_B, parents_B)))
        for row, tree in zip(rows, forest.trees, strict=True):
            if tree.drafted_depth:
                self.progress(row.request).reached_root(len(row.request.in_flight))

        def expand(depth: int, level: Level) -> Tensor:
            if depth >= len(logits_DBV):  # the tree is deeper than the number of heads
                return torch.full((len(level.batch_R), MAX_RANKS), -1, device=level.batch_R.device)
            return self._ranking.of(logits_DBV[depth][level.batch_R], level.nodes, depth, sampler)

        return expand


def _medusa(heads: MedusaHeads, context: DraftContext) -> MedusaDrafter:
    return MedusaDrafter(heads, heads.target_ids, context.state, context.sharpness)


METHOD = DraftMethod("medusa", _medusa)
