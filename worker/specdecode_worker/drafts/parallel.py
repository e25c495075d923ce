"""Drafters that propose all depths of a tree in one pass: P-EAGLE and DFlash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.core.batch import Row
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.paged_attention import PackedBatch, PackedTensors, PagedCache, slots_of, spread
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.base import (
    CapturedDrafter,
    DraftContext,
    DraftMethod,
    Expand,
    Ranking,
    catch_up_runs,
    causal_pass,
)
from specdecode_worker.drafts.eagle import Head, HeadDrafter, StateDrafter, head_parts
from specdecode_worker.models.config import PEagleConfig
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.eagle import PEagleHead
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Forest, Level, Nodes, all_nodes

# Drafter of the method peagle (P-EAGLE, arXiv 2602.01469): an EAGLE-3 head that proposes all depths in one pass.
#
# The pass runs the slots up to the root, as that of EAGLE heads does, and behind them one slot of the mask token for
# each further depth. The slot of the root proposes depth 1, the mask slot behind it depth 2, and so on. Mask slots know
# no drafted token, so all nodes of one depth have the same distribution; their children differ in rank alone, or by
# what the tokens on the path forbid. The keys of mask slots are where a tree's keys would, and are overwritten in the
# same way.
#
# vLLM packs its pass alike (vllm-project/vllm, vllm/v1/spec_decode/llm_base_proposer.py, ``parallel_drafting``).


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
    def proposing(self) -> list[int]:
        """Indices in the pass of the root and the mask slots of every request, request by request."""
        begins = accumulate(self.counts, initial=0)
        parts = zip(begins, self.committed, self.masks, strict=False)
        return [begin + count - 1 + depth for begin, count, masks in parts for depth in range(masks + 1)]


class PEagleDrafter(HeadDrafter, CapturedDrafter):
    """Drafter of the method peagle."""

    one_pass = True

    def __init__(
        self,
        head: MaskedHead,
        target_ids: Tensor | None,
        cache: PagedCache,
        state: DeviceState,
        positions: int,
        sharpness: Sequence[float] = (),
    ) -> None:
        """Create a drafter. The arguments are those of HeadDrafter."""
        super().__init__(head, target_ids, cache, state, positions, sharpness)
        self._masked_head = head

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Run the pass, and return the function that proposes tokens.

        Rows without a tree catch up as those of EAGLE heads do.
        """
        drafting, requests, committed = self.start_catch_up(rows, forest.trees)
        if not drafting:
            return None
        masks = [max(forest.trees[b].drafted_depth - 1, 0) for b in drafting]
        slots = _Slots(requests, committed, masks)
        logits_PV = self._head.logits(self._run(slots)[to_device(slots.proposing, self._state.length_S.device)])
        root_of = dict(zip(drafting, accumulate((count + 1 for count in masks), initial=0), strict=False))
        roots_B = to_device([root_of.get(b, 0) for b in range(len(rows))], logits_PV.device)

        def expand(depth: int, level: Level) -> Tensor:
            return self._ranking.of(logits_PV[roots_B[level.batch_R] + depth], level.nodes, depth, sampler)

        return expand

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the head's hidden states [T, E] at committed slots and at the mask slots behind the roots."""
        masked_T = index_T > self._state.length_S[slots_T]
        tokens_T = torch.where(masked_T, self._masked_head.config.mask_token_id, packed.tokens_T)
        aux_TA = self.columns.of(self._state.aux(slots_T, index_T - 1))
        return self.node_states(self._masked_head.masked_states(aux_TA, masked_T), replace(packed, tokens_T=tokens_T))

    def _run(self, slots: _Slots) -> Tensor:
        """Run the head over the slots and return its hidden states [T, E]."""
        state, counts = self._state, slots.counts
        first_B, _, _ = catch_up_runs(state, slots.requests, slots.committed)
        packed = causal_pass(state, slots.requests, counts, first_B, self.last_position, first_key=self.first_key)
        bounds = tuple(
            min(bound + masks, len(request.blocks) * BLOCK_SIZE)
            for bound, masks, request in zip(packed.key_bounds, slots.masks, slots.requests, strict=True)
        )
        sequence_T, row_T = spread(counts, first_B.device)
        slots_B = to_device([request.slot for request in slots.requests], first_B.device)
        index_T = first_B[sequence_T] + row_T
        return self.root_states(slots_B[sequence_T], index_T, replace(packed, key_bounds=bounds))


# Drafter of the method dflash (DFlash, arXiv 2602.06036): all depths in one pass over a block of mask slots.
#
# The draft's cache holds keys and values of committed tokens that are made of the target's states, at the index of each
# token; the root's state is not known yet. The block follows: the root, and a mask slot for each depth of the tree. Its
# slots see the committed tokens and each other. Their keys are overwritten once the tokens are accepted. The block is
# cut to the depth of the tree, since a request owns cache blocks for its tree only. A head that was trained on longer
# blocks then sees fewer mask slots than in training.
#
# In the terms of EAGLE heads, slot i is at index i - 1 of this cache. The first slot behind a prefix from the cache is
# therefore the last index of a shared block, which is written again with the same values.


class DFlashDrafter(StateDrafter, CapturedDrafter):
    """Drafter of the method dflash."""

    one_pass = block = True

    def __init__(
        self, head: DFlashHead, cache: PagedCache, state: DeviceState, positions: int, sharpness: Sequence[float] = ()
    ) -> None:
        """Create a drafter. The arguments are those of HeadDrafter; the head knows its vocabulary."""
        self.reads = head.reads
        self.first_slot, self.last_position = 1, positions - 1
        self._head, self._state = head, state
        self.kv_cache = self._cache = cache
        self._ranking = Ranking(head.target_ids, sharpness)

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Run the block, and return the function that proposes tokens.

        Rows without a tree catch up as those of EAGLE heads do.
        """
        behind = self.drafting(rows, forest.trees)
        if not behind:
            return None
        self._catch_up([rows[b].request for b in behind])
        drafting = [b for b in behind if forest.trees[b].drafted_depth]
        if not drafting:
            return None
        depths = [forest.trees[b].drafted_depth for b in drafting]
        packed = self._block([rows[b].request for b in drafting], [depth + 1 for depth in depths])
        begins = list(accumulate((depth + 1 for depth in depths), initial=0))
        masked = [begin + k for begin, depth in zip(begins, depths, strict=False) for k in range(1, depth + 1)]
        hidden_TE = self._head(packed.tokens_T, packed.positions_T, self._cache.attend(packed))
        logits_PV = self._head.logits(hidden_TE[to_device(masked, hidden_TE.device)])
        first_of = dict(zip(drafting, accumulate(depths, initial=0), strict=False))
        first_B = to_device([first_of.get(b, 0) for b in range(len(rows))], logits_PV.device)

        def expand(depth: int, level: Level) -> Tensor:
            return self._ranking.of(logits_PV[first_B[level.batch_R] + depth], level.nodes, depth, sampler)

        return expand

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Write the committed tokens that the draft lags behind, up to the one before the root."""
        counts = self.catch_up_counts(requests)
        self.record_catch_up(requests, counts)
        first_B, index_T, slots_T = catch_up_runs(self._state, requests, counts)
        packed = causal_pass(self._state, requests, counts, first_B, self.last_position, first_key=self.first_key)
        self._fused(self._state.aux(slots_T, index_T - 1), packed)

    def first_key(self, request: Request) -> int:
        """Return the first index of the request whose keys the draft attends to: slot i is at index i - 1."""
        return super().first_key(request) - 1

    def store_context(self, slots_T: Tensor, index_T: Tensor, positions_T: Tensor, places_T: Tensor) -> None:
        """Write the keys and values of committed tokens, from the target's states in the ring."""
        self._write(self._state.aux(slots_T, index_T), positions_T, places_T)

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the head's hidden states [T, E] at the roots and the mask slots behind them."""
        masked_T = index_T > self._state.length_S[slots_T]
        tokens_T = torch.where(masked_T, self._head.config.mask_token_id, packed.tokens_T)
        hidden_TE: Tensor = self._head(tokens_T, packed.positions_T, self._cache.attend(packed))
        return hidden_TE

    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Proposer) -> Tensor:
        """Return the best target token ids behind these nodes, from the states at the mask slots of their depth."""
        return self._ranking.of(self._head.logits(hidden_RE), at, depth, sampler)

    def _fused(self, aux_TA: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Write keys and values of the tokens before the slots of ``packed``, and return the states that they read."""
        assert isinstance(packed, PackedBatch), "a captured pass writes them by `store_context`"
        sequence_T, row_T = spread(packed.query_counts, aux_TA.device)
        index_T = packed.prefix_len_B[sequence_T] + row_T - 1
        places_T = slots_of(packed.block_table_BM, sequence_T, index_T)
        self._write(aux_TA, index_T.clamp(max=self.last_position), places_T)
        return aux_TA

    def _write(self, aux_TA: Tensor, positions_T: Tensor, places_T: Tensor) -> None:
        for layer, pair in enumerate(self._head.context(self.columns.of(aux_TA), positions_T)):
            self._cache.write(layer, places_T, *pair)

    def _block(self, requests: Sequence[Request], counts: Sequence[int]) -> PackedBatch:
        """Build the pass over blocks of ``counts[b]`` slots that begin at the root of each request."""
        state = self._state
        slots_B = to_device([request.slot for request in requests], state.length_S.device)
        length_B, table_BM = state.length_S[slots_B], state.block_table_SM[slots_B]
        sequence_T, row_T = spread(tuple(counts), slots_B.device)
        index_T = length_B[sequence_T] + row_T
        roots_T = state.tokens_SP[slots_B[sequence_T], index_T]
        whole = [all_nodes(count) for count in counts for _ in range(count)]
        bounds = [
            min(r.cached_bound + count, len(r.blocks) * BLOCK_SIZE) for r, count in zip(requests, counts, strict=True)
        ]
        return PackedBatch(
            tokens_T=torch.where(row_T > 0, self._head.config.mask_token_id, roots_T),
            positions_T=index_T.clamp(max=self.last_position),
            slots_T=slots_of(table_BM, sequence_T, index_T),
            prefix_len_B=length_B,
            ancestors_T=to_device(whole, slots_B.device),
            block_table_BM=table_BM,
            blocks=tuple(tuple(request.blocks) for request in requests),
            query_counts=tuple(counts),
            key_bounds=tuple(bounds),
            key_starts=tuple(self.first_key(request) for request in requests),
            dense=False,
        )


def _peagle(head: PEagleHead, context: DraftContext) -> PEagleDrafter:
    return PEagleDrafter(head, *head_parts(head, context))


def _dflash(head: DFlashHead, context: DraftContext) -> DFlashDrafter:
    cache = context.make_cache(head.config)
    return DFlashDrafter(head, cache, context.state, context.positions, context.sharpness)


METHODS = (DraftMethod("peagle", _peagle), DraftMethod("dflash", _dflash))
