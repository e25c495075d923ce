"""Drafters that propose all depths of a tree in one pass: P-EAGLE and DFlash."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdecode_worker.core.device_state import PackedBatch, PackedTensors, slots_of, spread
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.eagle import EagleDrafter, HeadDrafter
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.eagle import PEagleHead

# Drafter of the method peagle (P-EAGLE, arXiv 2602.01469): an EAGLE-3 head that proposes all depths in one pass.
#
# The pass runs the slots up to the root, as that of EAGLE heads does, and behind them one slot of the mask token for
# each further depth. The slot of the root proposes depth 1, the mask slot behind it depth 2, and so on. Mask slots know
# no drafted token, so all nodes of one depth have the same distribution; their children differ in rank alone, or by
# what the tokens on the path forbid. The keys of mask slots are where a tree's keys would, and are overwritten in the
# same way.
#
# vLLM packs its pass alike (vllm-project/vllm, vllm/v1/spec_decode/llm_base_proposer.py, ``parallel_drafting``).


class PEagleDrafter(EagleDrafter):
    """Drafter of the method peagle."""

    one_pass = True
    _head: PEagleHead

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Return the head's hidden states [T, E] at committed slots and at the mask slots behind the roots."""
        masked_T = index_T > self._state.length_S[slots_T]
        tokens_T = torch.where(masked_T, self._head.config.mask_token_id, packed.tokens_T)
        aux_TA = self.columns.of(self._state.aux(slots_T, index_T - 1))
        return self.node_states(self._head.masked_states(aux_TA, masked_T), replace(packed, tokens_T=tokens_T))


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


class DFlashDrafter(HeadDrafter):
    """Drafter of the method dflash."""

    one_pass = block = True
    _head: DFlashHead

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
