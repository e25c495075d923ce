"""Unrolled pass of P-EAGLE heads over recorded text, with conditional drop-token sampling (COD).

A P-EAGLE head drafts from a root with mask slots: the slot k tokens behind the root reads the learned mask state and
the embedding of the mask token, and its query sees the true slots up to the root and the mask slots of its own root.
The slots of all roots run in one pass per depth, which is exact for every root.

Training every depth at every root takes as many rows as depths. COD (P-EAGLE, arXiv 2602.01469) trains deeper depths
at fewer roots: a root that is dropped at one depth is dropped at all deeper ones, because its deeper slots attend to
the shallower ones. The share that is kept falls geometrically to a floor; both values are the defaults of speculators
(vllm-project/speculators, src/speculators/models/peagle/data.py).

Shape suffixes: B texts, L slots of a text, A answer slots, R roots of a depth, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from specdecode_worker.models.networks.peagle import PEagleHead
from specdecode_worker.training.heads.unroll import Batch, UnrolledAttention, gather_rows, true_states

SHARE_PER_DEPTH, LEAST_SHARE = 0.7, 0.2
"""Share of the roots that each depth keeps of those of the depth before, and the least share of all."""


def trained_roots(slots: int, k: int, *, sampled: bool) -> int:
    """Return the number of roots of a text with ``slots`` answer slots that are trained at depth ``k``."""
    return math.ceil(max(slots - k, 0) * _share(k, sampled=sampled))


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
    order_BA = _root_order(batch.valid_BA, depth, sample_seed)
    mask_1E, sampled = head.mask_state, sample_seed is not None
    for k in range(1, depth):
        order_BR = order_BA[:, : max(trained_roots(order_BA.shape[1], k, sampled=sampled), 1)]
        roots_BR = batch.answers_BA.gather(1, order_BR)
        attend.keep(roots_BR)
        tokens_T = torch.full((roots_BR.numel(),), head.config.mask_token_id, device=roots_BR.device)
        positions_T = (roots_BR + k + 1).flatten()
        state_TE = head(mask_1E.expand(len(tokens_T), -1), tokens_T, positions_T, attend)
        trained_BR = _trained(batch.valid_BA, order_BR, k, sampled=sampled)
        yield _by_slot(state_TE.unflatten(0, roots_BR.shape), order_BR + k, trained_BR, batch.valid_BA)


def _share(k: int, *, sampled: bool) -> float:
    """Return the share of the roots that are trained at depth ``k``."""
    return max(SHARE_PER_DEPTH**k, LEAST_SHARE) if sampled else 1.0


def _root_order(valid_BA: Tensor, depth: int, sample_seed: int | None) -> Tensor:
    """Return the order [B, A] in which roots are kept: every depth keeps the first ones.

    The last roots of a text, which have no slots at the deepest depths, come last, in the order of the text.
    """
    place_BA = torch.arange(valid_BA.shape[1], device=valid_BA.device).expand(valid_BA.shape)
    if sample_seed is None:
        return place_BA
    generator = torch.Generator().manual_seed(sample_seed)
    random_BA = torch.rand(valid_BA.shape, generator=generator).to(valid_BA.device)
    whole_B1 = valid_BA.sum(dim=1, keepdim=True) - depth + 1
    return torch.where(place_BA < whole_B1, random_BA, 1.0 + place_BA).argsort(dim=1)


def _trained(valid_BA: Tensor, order_BR: Tensor, k: int, *, sampled: bool) -> Tensor:
    """Return the mask [B, R] of the roots in ``order_BR`` that `trained_roots` counts for each text."""
    slots_B1 = (valid_BA.sum(dim=1, keepdim=True) - k).clamp(min=0)
    counts_B1 = (slots_B1.double() * _share(k, sampled=sampled)).ceil()
    return torch.arange(order_BR.shape[1], device=order_BR.device) < counts_B1


def _by_slot(state_BRE: Tensor, slot_BR: Tensor, trained_BR: Tensor, valid_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states by answer slot [B, A, E], zero where no root was kept, and the mask [B, A] of kept ones."""
    rows, answers = valid_BA.shape
    to_BR = torch.where(trained_BR, slot_BR, answers)  # the last column takes what is not kept
    state_BAE = state_BRE.new_zeros(rows, answers + 1, state_BRE.shape[-1])
    state_BAE = state_BAE.scatter(1, to_BR[:, :, None].expand_as(state_BRE), state_BRE)
    return state_BAE[:, :answers], valid_BA.new_zeros(rows, answers + 1).scatter(1, to_BR, trained_BR)[:, :answers]


class _RootAttention(UnrolledAttention):
    """Attention for ``unroll_parallel``. Rows of a depth belong to the first roots of those of the depth before."""

    def keep(self, roots_BR: Tensor) -> None:
        """Advance to the next depth, whose rows belong to the roots ``roots_BR``, as slot indices."""
        self._depth += 1
        self._hide_after(roots_BR)

    def _aligned(self, x: Tensor, depth: int) -> Tensor:
        return x[:, : self._hidden_BAL.shape[1]]
