"""Drafter of the method peagle (P-EAGLE, arXiv 2602.01469): an EAGLE-3 head that proposes all depths in one pass.

The pass runs the slots up to the root, as that of EAGLE heads does, and behind them one slot of the mask token for each
further depth. The slot of the root proposes depth 1, the mask slot behind it depth 2, and so on. Mask slots know no
drafted token, so all nodes of one depth have the same distribution; their children differ in rank alone, or by what the
tokens on the path forbid. The keys of mask slots are where a tree's keys would, and are overwritten in the same way.

vLLM packs its pass alike (vllm-project/vllm, vllm/v1/spec_decode/llm_base_proposer.py, ``parallel_drafting``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.draft_passes import catch_up_runs, causal_pass
from specdecode_worker.engine.drafts.drafter import Expand
from specdecode_worker.engine.drafts.eagle import EagleDrafter, Head
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedBatch, spread
from specdecode_worker.models.configs.peagle_config import PEagleConfig
from specdecode_worker.speculation.sampling.sampler import Sampler
from specdecode_worker.speculation.trees import Forest, Level


class MaskedHead(Head, Protocol):
    """Interface of a head with mask slots, implemented by PEagleHead."""

    @property
    def config(self) -> PEagleConfig:
        """Shape of the head, with its mask token."""
        ...

    def masked_states(self, aux_TA: Tensor, masked_T: Tensor) -> Tensor:
        """Return input states [T, E]: the learned one at masked slots, else those of the target's states."""
        ...


@dataclass(frozen=True, slots=True)
class _Slots:
    """Slots of one pass: for each request ``committed`` slots up to the root, and ``masks`` slots behind it."""

    requests: list[Request]
    committed: list[int]
    masks: list[int]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of slots of each request."""
        return tuple(count + masks for count, masks in zip(self.committed, self.masks, strict=True))

    @property
    def is_masked(self) -> list[bool]:
        """True for each slot of the pass that is a mask slot."""
        parts = zip(self.committed, self.masks, strict=True)
        return [masked for count, masks in parts for masked in [False] * count + [True] * masks]

    @property
    def proposing(self) -> list[int]:
        """Indices in the pass of the root and the mask slots of every request, request by request."""
        begins = accumulate(self.counts, initial=0)
        parts = zip(begins, self.committed, self.masks, strict=False)
        return [begin + count - 1 + depth for begin, count, masks in parts for depth in range(masks + 1)]


class PEagleDrafter(EagleDrafter):
    """Drafter of the method peagle."""

    parallel = True
    captured = False

    def __init__(
        self,
        head: MaskedHead,
        target_ids: Tensor | None,
        cache: PagedCache,
        state: DeviceState,
        positions: int,
        sharpness: Sequence[float] = (),
    ) -> None:
        """Create a drafter. The arguments are those of EagleDrafter."""
        super().__init__(head, target_ids, cache, state, positions, sharpness)
        self._masked_head = head

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Expand | None:
        """Run the pass, and return the function that proposes tokens.

        Rows without a tree catch up as those of EAGLE heads do.
        """
        drafting = self.drafting(rows, forest.trees)
        if not drafting:
            return None
        requests = [rows[b].request for b in drafting]
        committed = self.catch_up_counts(requests)
        self.record_catch_up(requests, committed)
        masks = [max(forest.trees[b].drafted_depth - 1, 0) for b in drafting]
        slots = _Slots(requests, committed, masks)
        logits_PV = self._head.logits(self._run(slots)[to_device(slots.proposing, self._state.length_S.device)])
        root_of = dict(zip(drafting, accumulate((count + 1 for count in masks), initial=0), strict=False))
        roots_B = to_device([root_of.get(b, 0) for b in range(len(rows))], logits_PV.device)

        def expand(depth: int, level: Level) -> Tensor:
            return self._ranking.of(logits_PV[roots_B[level.batch_R] + depth], level.nodes, depth, sampler)

        return expand

    def _run(self, slots: _Slots) -> Tensor:
        """Run the head over the slots and return its hidden states [T, E]."""
        state = self._state
        first_B, _, _ = catch_up_runs(state, slots.requests, slots.committed)
        packed = causal_pass(state, slots.requests, slots.counts, first_B, self.last_position, first_key=self.first_key)
        masked_T = to_device(slots.is_masked, first_B.device)
        packed = _with_masks(packed, slots, masked_T, self._masked_head.config.mask_token_id)
        sequence_T, row_T = spread(slots.counts, first_B.device)
        slots_B = to_device([request.slot for request in slots.requests], first_B.device)
        aux_TA = state.aux(slots_B[sequence_T], first_B[sequence_T] + row_T - 1)
        hidden_TE = self._masked_head.masked_states(self.columns.of(aux_TA), masked_T)
        return self.node_states(hidden_TE, packed)


def _with_masks(packed: PackedBatch, slots: _Slots, masked_T: Tensor, mask_token: int) -> PackedBatch:
    """Return the pass with the mask token at masked slots, and bounds that include their keys."""
    bounds = tuple(
        min(bound + masks, len(request.blocks) * BLOCK_SIZE)
        for bound, masks, request in zip(packed.key_bounds, slots.masks, slots.requests, strict=True)
    )
    tokens_T = torch.where(masked_T, mask_token, packed.tokens_T)
    return replace(packed, tokens_T=tokens_T, key_bounds=bounds)
