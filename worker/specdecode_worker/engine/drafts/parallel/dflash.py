"""Drafter of the method dflash (DFlash, arXiv 2602.06036): all depths in one pass over a block of mask slots.

The draft's cache holds keys and values of committed tokens that are made of the target's states, at the index of each
token; the root's state is not known yet. The block follows: the root, and a mask slot for each depth of the tree. Its
slots see the committed tokens and each other. Their keys are overwritten once the tokens are accepted. The block is cut
to the depth of the tree, since a request owns cache blocks for its tree only. A head that was trained on longer blocks
then sees fewer mask slots than in training.

In the terms of EAGLE heads, slot i is at index i - 1 of this cache. The first slot behind a prefix from the cache is
therefore the last index of a shared block, which is written again with the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.drafts.aux_hidden_states import StateColumns
from specdecode_worker.engine.drafts.draft_passes import catch_up_runs, causal_pass
from specdecode_worker.engine.drafts.drafter import Expand, Ranking
from specdecode_worker.engine.drafts.eagle import StateDrafter
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedBatch, PackedTensors, slots_of, spread
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.speculation.sampling.row_selection import Nodes
from specdecode_worker.speculation.sampling.sampler import Proposer, Sampler
from specdecode_worker.speculation.trees import Forest, Level

_NOT_CAPTURED = "passes of a parallel draft are not captured"


class DFlashDrafter(StateDrafter):
    """Drafter of the method dflash."""

    parallel = True
    captured = False

    def __init__(
        self, head: DFlashHead, cache: PagedCache, state: DeviceState, positions: int, sharpness: Sequence[float] = ()
    ) -> None:
        """Create a drafter. The arguments are those of EagleDrafter; the head knows its vocabulary."""
        self.reads = head.reads
        self.columns = StateColumns()
        self.first_slot, self.last_position = 1, positions - 1
        self._head, self._cache, self._state = head, cache, state
        self._ranking = Ranking(head.target_ids, sharpness)

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Sampler) -> Expand | None:
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

    def root_states(self, slots_T: Tensor, index_T: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        raise NotImplementedError(_NOT_CAPTURED)

    def node_states(self, hidden_RE: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        raise NotImplementedError(_NOT_CAPTURED)

    def rank(self, hidden_RE: Tensor, at: Nodes, depth: int, sampler: Proposer) -> Tensor:
        raise NotImplementedError(_NOT_CAPTURED)

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Write the committed tokens that the draft lags behind, up to the one before the root."""
        counts = self.catch_up_counts(requests)
        self.record_catch_up(requests, counts)
        first_B, index_T, slots_T = catch_up_runs(self._state, requests, counts)
        packed = causal_pass(self._state, requests, counts, first_B, self.last_position, first_key=self.first_key)
        self._fused(self._state.aux(slots_T, index_T - 1), packed)

    def _fused(self, aux_TA: Tensor, packed: PackedBatch | PackedTensors) -> Tensor:
        """Write keys and values of the tokens before the slots of ``packed``, and return their states."""
        assert isinstance(packed, PackedBatch), _NOT_CAPTURED
        sequence_T, row_T = spread(packed.query_counts, aux_TA.device)
        index_T = packed.prefix_len_B[sequence_T] + row_T - 1
        own_TA = self.columns.of(aux_TA)
        slots_T = slots_of(packed.block_table_BM, sequence_T, index_T)
        for layer, pair in enumerate(self._head.context(own_TA, index_T.clamp(max=self.last_position))):
            self._cache.write(layer, slots_T, *pair)
        return own_TA

    def _block(self, requests: Sequence[Request], counts: Sequence[int]) -> PackedBatch:
        """Build the pass over blocks of ``counts[b]`` slots that begin at the root of each request."""
        state = self._state
        slots_B = to_device([request.slot for request in requests], state.length_S.device)
        length_B, table_BM = state.length_S[slots_B], state.block_table_SM[slots_B]
        sequence_T, row_T = spread(tuple(counts), slots_B.device)
        index_T = length_B[sequence_T] + row_T
        roots_T = state.tokens_SP[slots_B[sequence_T], index_T]
        whole = [(1 << count) - 1 for count in counts for _ in range(count)]
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
            key_starts=tuple(self.first_key(request) - 1 for request in requests),
            dense=False,
        )
