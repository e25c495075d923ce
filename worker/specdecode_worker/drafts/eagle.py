"""Drafter of EAGLE and EAGLE-3 heads, with a paged KV cache of its own.

Draft slot i holds the pair (target's state h[i-1], embedding of token i); slot 0 does not exist. The head runs over
the prompt along with the target. In each step, the first pass rewrites the slots of recently accepted tokens up to the
root, from the target's states (stored in the ring of DeviceState). Each further pass runs the next level of the tree,
from the head's own states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.core.device_state import (
    STATE_RING_POSITIONS,
    DeviceState,
    PackedBatch,
    PackedTensors,
    PagedCache,
)
from specdecode_worker.core.request import Request, Row
from specdecode_worker.drafts.base import (
    CapturedDrafter,
    DraftContext,
    PagedDrafter,
    Ranking,
    target_ids_of,
)
from specdecode_worker.models.causal_lm import Attend
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.trees import Tree


class Head(Protocol):
    """Interface of a draft head, implemented by Eagle3Head and EagleHead.

    A call returns the hidden states [T, E] of the head. They are the input of ``logits``, and of the next level's call
    in place of the states that ``fuse`` makes from the target's.
    """

    @property
    def reads(self) -> TargetStates:
        """Target states that the head reads."""
        ...

    def fuse(self, aux_TA: Tensor) -> Tensor:
        """Combine the target states [T, A] of each token to input states [T, E]."""
        ...

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Return the logits over the draft's vocabulary, [T, V]."""
        ...

    def __call__(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the head's hidden states [T, E] for input states and tokens."""
        ...


class StateDrafter(PagedDrafter):
    """Paged drafter whose slot i reads the target's state h[i-1]; it catches up from the ring of DeviceState."""

    def ready(self, request: Request) -> bool:
        """Return whether the ring holds the target state that the head needs at the root."""
        return request.cached_min > self.progress(request).features_from

    def drafting(self, rows: Sequence[Row], trees: Sequence[Tree]) -> list[int]:
        """Return the indices of the rows that draft or must catch up in this step."""
        return [
            b
            for b, row in enumerate(rows)
            if (trees[b].drafted_depth or self._must_catch_up(row.request)) and not row.is_chunk
        ]

    def catch_up_counts(self, requests: Sequence[Request]) -> list[int]:
        """Return the number of slots up to the root to run for each request, limited by what the ring holds."""
        counts = []
        for request in requests:
            progress = self.progress(request)
            in_ring = max(request.cached_min - progress.features_from, 1)
            counts.append(min(request.draft_backlog(1, progress), STATE_RING_POSITIONS, in_ring))
        return counts

    def _must_catch_up(self, request: Request) -> bool:
        """Return whether the head must run now for a request without a tree, before the ring loses its states."""
        if not self.serves(request):
            return False
        is_behind = self.progress(request).lag >= STATE_RING_POSITIONS - MAX_RANKS
        return is_behind and self.ready(request)


class HeadDrafter(StateDrafter, CapturedDrafter):
    """Drafter of one head that reads target states."""

    _head: Any

    def __init__(
        self,
        head: Any,
        target_ids: Tensor | None,
        cache: PagedCache,
        state: DeviceState,
        positions: int,
        sharpness: Sequence[float] = (),
    ) -> None:
        """Create a drafter.

        Args:
            head: Draft head.
            target_ids: As for Ranking.
            cache: KV cache of the head.
            state: Device state of the running requests.
            positions: Number of positions that the head supports.
            sharpness: As for Ranking.
        """
        self.reads = head.reads
        self.first_slot, self.last_position = 1, positions - 1
        self._head, self._state = head, state
        self.kv_cache = self._cache = cache
        self._ranking = Ranking(target_ids, sharpness)

    @classmethod
    def of(cls, head: Any, context: DraftContext) -> Self:
        """Create the drafter of a loaded head."""
        ids, cache = target_ids_of(head, context), context.make_cache(head.config)
        return cls(head, ids, cache, context.state, context.positions, context.sharpness)

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Run the head over prefill chunks.

        The first slot of a chunk needs the target state before the chunk, which is read from the ring.
        """
        slots = to_device([row.request.slot for row in rows], aux_TA.device)
        starts = to_device([row.start for row in rows], aux_TA.device)
        before_BA = self._state.aux(slots, (starts - 1).clamp(min=0))
        parts, chunks, end = [], [], 0
        for b, row in enumerate(rows):
            begin, end = end, end + row.count
            parts += [before_BA[b : b + 1] if row.start else before_BA[:0], aux_TA[begin : end - 1]]
            first = max(row.start, 1)
            if count := row.start + row.count - first:
                chunks.append((row.request, count, first))
        if chunks:
            requests, counts, firsts = zip(*chunks, strict=True)
            first_B = to_device(firsts, aux_TA.device)
            self._fused(torch.cat(parts), self.causal_pass(requests, counts, first_B))
        self.record_prefill(rows)

    def logits(self, hidden_RE: Tensor, depth: int) -> Tensor:
        """Return the logits of the head's tokens behind these states, [R, V]."""
        logits_RV: Tensor = self._head.logits(hidden_RE)
        return logits_RV

    @abstractmethod
    def _fused(self, aux_TA: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Run the draft over committed slots, from the target's states before them."""


class EagleDrafter(HeadDrafter):
    """Drafter of the methods eagle3 and eagle, whose heads read pairs of a target state and a token.

    Rows without a tree catch up too when they lag so far that the ring would soon lose the states they need.
    """

    _head: Head

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the head's hidden states [T, E] at committed slots, from the target's states in the ring."""
        return self._fused(self._state.aux(slots_T, index_T - 1), packed)

    def node_states(self, hidden_RE: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the head's hidden states [R, E] at tree nodes, from the states of their parents."""
        return self._head(hidden_RE, packed.tokens_T, packed.positions_T, self._cache.attend(packed))

    def _fused(self, aux_TA: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        return self.node_states(self._head.fuse(self.columns.of(aux_TA)), packed)
