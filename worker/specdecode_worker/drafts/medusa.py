"""Drafter of Medusa heads (Cai et al., arXiv 2401.10774), one head for each depth.

Head d reads the target's final hidden state at the token before the root, and proposes the tokens of depth d + 1
independently of those of other depths: all nodes of one depth have the same children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.core.device_state import DeviceState, PackedBatch, PackedTensors
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.base import CapturedDrafter, DraftContext, Ranking, target_ids_of
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Nodes


class MedusaDrafter(CapturedDrafter):
    """Drafter of the method medusa. It has no cache; the "pass" of a level runs its head.

    Acceptance is exact, as for other methods; the typical acceptance of the paper would change the text.
    """

    first_slot, last_position = 0, 2**31 - 1  # no keys, and no position embedding

    def __init__(
        self, heads: MedusaHeads, target_ids: Tensor | None, state: DeviceState, sharpness: Sequence[float] = ()
    ) -> None:
        """Create a drafter. ``target_ids`` and ``sharpness`` are as for Ranking."""
        self.reads = heads.reads
        self._heads, self._state = heads, state
        self._ranking = Ranking(target_ids, sharpness)

    @classmethod
    def of(cls, heads: MedusaHeads, context: DraftContext) -> Self:
        """Create the drafter of loaded heads."""
        return cls(heads, target_ids_of(heads, context), context.state, context.sharpness)

    def ready(self, request: Request) -> bool:
        """Return whether the ring holds the target state that the heads need."""
        return request.cached_min > self.progress(request).features_from

    def catch_up_counts(self, requests: Sequence[Request]) -> list[int]:
        """Return 1 for each request: the heads run at the root alone."""
        return [1] * len(requests)

    def record_catch_up(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Record that the heads run at the root of each request."""
        for request in requests:
            self.progress(request).reached_root(len(request.in_flight))

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the target's states before the roots."""
        return self.columns.of(self._state.aux(slots_T, (index_T - 1).clamp(min=0)))

    def logits(self, hidden_RE: Tensor, depth: int) -> Tensor:
        """Return the logits of the head of this depth, [R, V]."""
        return self._heads.head_logits(hidden_RE, depth)

    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Proposer) -> Tensor:
        """Return the best target token ids behind these nodes, [R, K]; none if there is no head of this depth."""
        if depth >= self._heads.count:
            return torch.full((len(at.batch_R), MAX_RANKS), -1, dtype=torch.int64, device=at.batch_R.device)
        return super().rank(hidden_RE, at, depth, sampler)
