"""Medusa heads (Cai et al., arXiv 2401.10774): every depth is proposed at once, from the state that chose the root.

Head d reads the target's final state at the root's parent, whose own head chose the root, and proposes depth d + 1
whatever was proposed before. So a tree costs one pass, and nodes of one depth have the same children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.drafts.aux_hidden_states import Columns
from specdecode_worker.engine.drafts.drafter import Ranking, grow
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.models.configs.target_states import Reads
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import Forest, Level


class Heads(Protocol):
    """Medusa's heads; ``logits`` is [heads, B, V] of the final states [B, E]."""

    @property
    def reads(self) -> Reads: ...
    def logits(self, hidden_BE: Tensor) -> Tensor: ...


class MedusaDrafter:
    """Drafter of method medusa. Proposals are held to the target's own choice: typical acceptance loses the text."""

    def __init__(
        self, heads: Heads, target_ids: Tensor | None, state: DeviceState, sharpness: Sequence[float] = ()
    ) -> None:
        """``target_ids`` and ``sharpness`` as for Ranking."""
        self.reads, self.columns = heads.reads, Columns()
        self._heads, self._state = heads, state
        self._ranking = Ranking(target_ids, sharpness)

    def ready(self, request: Request) -> bool:
        return request.cached_least > request.draft.features_from

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        for row in rows:
            row.request.draft.lag = 1

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Tensor | None:
        if not forest.levels:
            return None
        slots_B = to_device([row.request.slot for row in rows], self._state.length_S.device)
        parents_B = (self._state.length_S[slots_B] - 1).clamp(min=0)
        logits_DBV = self._heads.logits(self.columns.of(self._state.aux(slots_B, parents_B)))
        for row, tree in zip(rows, forest.trees, strict=True):
            if tree.drafted_depth:
                row.request.draft.reached_root(len(row.request.in_flight))

        def expand(depth: int, level: Level) -> Tensor:
            if depth >= len(logits_DBV):  # a tree deeper than there are heads
                return torch.full((len(level.batch_R), MAX_RANKS), -1, device=level.batch_R.device)
            return self._ranking.of(logits_DBV[depth][level.batch_R], level.nodes, depth, sampler)

        return grow(rows, forest, self._state, expand)
