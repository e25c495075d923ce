"""EAGLE heads on a paged cache of their own: prompts beside the target's, then trees level by level.

Draft slot i holds the pair (target's state h[i-1], embedding of token i); slot 0 does not exist. Every step first
rewrites the slots that the last steps accepted from the target's true states (kept in the ring of state.py) and ends
at the root; each further pass runs the newest level of the tree, whose states are the head's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.engine.drafts.aux_hidden_states import Columns
from specdecode_worker.engine.drafts.draft_passes import catch_up_runs, causal_pass, level_pass, roots_of
from specdecode_worker.engine.drafts.drafter import PagedDrafter, Ranking, grow
from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import RING, DeviceState
from specdecode_worker.engine.step.packed_batch import Packed, Tables
from specdecode_worker.models.configs.target_states import Reads
from specdecode_worker.models.networks.layers import Attend
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import Forest, Level, Tree


class Head(Protocol):
    """What a head must do; Eagle3Head and EagleHead do. States are passed on as the head makes them."""

    @property
    def reads(self) -> Reads: ...
    def fuse(self, aux_TA: Tensor) -> Tensor: ...
    def logits(self, hidden_TE: Tensor) -> Tensor: ...
    def __call__(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor: ...


class EagleDrafter(PagedDrafter):
    """Drafter of methods eagle3 and eagle."""

    def __init__(
        self,
        head: Head,
        target_ids: Tensor | None,
        cache: PagedCache,
        state: DeviceState,
        positions: int,
        sharpness: Sequence[float] = (),
    ) -> None:
        """``target_ids`` and ``sharpness`` as for Ranking."""
        self.reads = head.reads
        self.columns = Columns()
        self.first_slot, self.last_position = 1, positions - 1
        self._head, self._cache, self._state = head, cache, state
        self._ranking = Ranking(target_ids, sharpness)

    def ready(self, request: Request) -> bool:
        return request.cached_least > request.draft.features_from

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """The first slot of a chunk needs the state before the chunk, which the ring has kept."""
        slots = to_device([row.request.slot for row in rows], aux_TA.device)
        starts = to_device([row.start for row in rows], aux_TA.device)
        before_BA = self._state.aux(slots, (starts - 1).clamp(min=0))
        parts, counts, firsts, end = [], [], [], 0
        for b, row in enumerate(rows):
            begin, end = end, end + row.count
            head = before_BA[b : b + 1] if row.start else before_BA[:0]
            parts += [head, aux_TA[begin : end - 1]]
            firsts.append(max(row.start, 1))
            counts.append(row.start + row.count - firsts[-1])
        if sum(counts):
            kept = [
                (row.request, count, first) for row, count, first in zip(rows, counts, firsts, strict=True) if count
            ]
            first_B = to_device([first for *_, first in kept], aux_TA.device)
            requests = [request for request, *_ in kept]
            packed = causal_pass(
                self._state, requests, [count for _, count, _ in kept], first_B, self.last_position, first_slot=1
            )
            self._fused(torch.cat(parts), packed)
        for row in rows:
            if row.request.draft.lag > 1:  # it did not follow the prompt so far
                row.request.draft.start = max(row.start, 1)
            row.request.draft.lag = 1

    def propose(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Tensor | None:
        """Lagging drafts of rows that draft nothing catch up before the ring forgets what they need."""
        drafting = self.drafting(rows, forest.trees)
        if not drafting:
            return None
        hidden_RE = self._caught_up(rows, drafting)

        def expand(depth: int, level: Level) -> Tensor:
            nonlocal hidden_RE
            hidden_RE = hidden_RE[level.source_R]
            if depth:
                packed = level_pass(self._state, rows, level, depth, forest, self.last_position, first_slot=1)
                hidden_RE = self.node_states(hidden_RE, packed)
            return self.rank(hidden_RE, level.nodes, depth, sampler)

        return grow(rows, forest, self._state, expand)

    def drafting(self, rows: Sequence[Row], trees: Sequence[Tree]) -> list[int]:
        return [b for b, row in enumerate(rows) if not row.is_chunk and self._runs_now(row, trees[b])]

    def behind(self, requests: Sequence[Request]) -> list[int]:
        return [self._reachable(request) for request in requests]

    def caught_up(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        for request, count in zip(requests, counts, strict=True):
            if request.unseen(1) > count:  # the ring has forgotten what lies between: the draft begins anew
                request.draft.start = max(request.cached_least + 1 - count, 1)
            request.draft.reached_root(len(request.in_flight))

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: Packed | Tables) -> Tensor:
        return self._fused(self._state.aux(slots_T, index_T - 1), packed)

    def node_states(self, hidden_RE: Tensor, packed: Packed | Tables) -> Tensor:
        return self._head(hidden_RE, packed.tokens_T, packed.positions_T, self._cache.attend(packed))

    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Sampler) -> Tensor:
        return self._ranking.of(self._head.logits(hidden_RE), at, depth, sampler)

    def _caught_up(self, rows: Sequence[Row], drafting: list[int]) -> Tensor:
        """Runs the slots up to the root, as many as the draft lags behind; the roots' hidden states [B, E]."""
        requests = [rows[b].request for b in drafting]
        counts = self.behind(requests)
        self.caught_up(requests, counts)
        first_B, index_T, slots_T = catch_up_runs(self._state, requests, counts)
        packed = causal_pass(self._state, requests, counts, first_B, self.last_position, first_slot=1)
        return roots_of(self.root_states(slots_T, index_T, packed), counts, drafting, len(rows))

    def _reachable(self, request: Request) -> int:
        """Slots up to the root that can be run from the states that the ring still holds."""
        return min(request.unseen(1), RING, max(request.cached_least - request.draft.features_from, 1))

    def _runs_now(self, row: Row, tree: Tree) -> bool:
        return tree.drafted_depth > 0 or (row.request.draft.lag >= RING - MAX_RANKS and self.ready(row.request))

    def _fused(self, aux_TA: Tensor, packed: Packed | Tables) -> Tensor:
        return self.node_states(self._head.fuse(self.columns.of(aux_TA)), packed)
