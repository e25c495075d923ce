"""Unrolled pass of P-EAGLE heads over recorded text, with conditional drop-token sampling (COD).

A P-EAGLE head drafts from a root with mask slots: the slot k tokens behind the root reads the learned mask state and
the embedding of the mask token, and its query sees the true slots up to the root and the mask slots of its own root.
The slots of all roots run in one pass per depth, which is exact for every root.

Training every depth at every root takes as many rows as depths. COD (P-EAGLE, arXiv 2602.01469) trains deeper depths
at fewer roots. The share that is trained falls geometrically to a floor; both values are the defaults of speculators
(vllm-project/speculators, src/speculators/models/peagle/data.py).

Shape suffixes: B texts, L slots of a text, A answer slots, R roots of a depth, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdecode_worker.models.networks.peagle import PEagleHead
from specdecode_worker.training.heads.root_sampling import all_roots, by_slot, root_count, root_order, trained_mask
from specdecode_worker.training.heads.unroll import Batch, UnrolledAttention, gather_rows, true_states

SHARE_PER_DEPTH, LEAST_SHARE = 0.7, 0.2
"""Share of the roots that each depth keeps of those of the depth before, and the least share of all."""


def cod_share(k: int) -> float:
    """Return the share of the roots that is trained at depth ``k``."""
    return max(SHARE_PER_DEPTH**k, LEAST_SHARE)


def unroll_parallel(
    head: PEagleHead, batch: Batch, depth: int, sample_seed: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k the states [B, A, E] before the head's norm and the mask [B, A] of slots with a root.

    Row a of depth k belongs to the root a - k. Rows without a root are zero.

    Args:
        head: Head to unroll.
        batch: Recorded texts.
        depth: Number of depths.
        sample_seed: Seed of the roots that COD keeps. None keeps all.
    """
    attend = _RootAttention(batch.answers_BA, layers=head.config.num_hidden_layers)
    yield gather_rows(true_states(head, batch, attend), batch.answers_BA), batch.valid_BA
    share = all_roots if sample_seed is None else cod_share
    order_BA, mask_1E = root_order(batch.valid_BA, depth, sample_seed), head.mask_state
    for k in range(1, depth):
        order_BR = order_BA[:, : max(root_count(order_BA.shape[1], k, share), 1)]
        roots_BR = batch.answers_BA.gather(1, order_BR)
        attend.keep(roots_BR)
        tokens_T = torch.full((roots_BR.numel(),), head.config.mask_token_id, device=roots_BR.device)
        positions_T = (roots_BR + k + 1).flatten()
        state_TE = head(mask_1E.expand(len(tokens_T), -1), tokens_T, positions_T, attend)
        trained_BR = trained_mask(batch.valid_BA, order_BR.shape[1], k, share)
        yield by_slot(state_TE.unflatten(0, roots_BR.shape), order_BR + k, trained_BR, batch.valid_BA)


class _RootAttention(UnrolledAttention):
    """Attention for ``unroll_parallel``. Rows of a depth belong to the first roots of those of the depth before."""

    def keep(self, roots_BR: Tensor) -> None:
        """Advance to the next depth, whose rows belong to the roots ``roots_BR``, as slot indices."""
        self._depth += 1
        self._hide_after(roots_BR)

    def _aligned(self, x: Tensor, depth: int) -> Tensor:
        return x[:, : self._hidden_BAL.shape[1]]
