"""Unrolled pass of DFlash heads over recorded text: a block of mask slots behind every root, or behind anchors.

A block holds the root and a mask slot for each depth. Its slots see the target's states before the root, and each
other. All blocks of some roots run in one pass, which is exact for every root. Training runs the blocks of a share of
the roots (anchors, arXiv 2602.06036), drawn anew in every step.

Shape suffixes: B texts, L slots of a text, A answer slots, R roots, N slots of a block, K key-value heads, G queries
per kv head, D head size, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.training.heads.root_sampling import all_roots, by_slot, root_count, root_order, trained_mask
from specdecode_worker.training.heads.unroll import Batch

ANCHORS = 0.25
"""Share of the roots that a step trains. A block runs all depths, so a step runs about as many slots as roots."""
_ROOTS = 64
"""Roots of one pass, which bounds the memory of attention."""


def anchor_share(k: int) -> float:
    """Return the share of the roots that is trained, the same at every depth."""
    return ANCHORS


def unroll_blocks(
    head: DFlashHead, batch: Batch, depth: int, sample_seed: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth k the states [B, A, E] before the head's norm and the mask [B, A] of slots with a root.

    Row a of depth k belongs to the root a - k. Rows without a root are zero. Blocks have ``depth`` mask slots.

    Args:
        head: Head to unroll.
        batch: Recorded texts.
        depth: Number of depths.
        sample_seed: Seed of the anchors. None takes every root.
    """
    rows, slots = batch.tokens_BL.shape
    positions_BL = torch.arange(slots, device=batch.tokens_BL.device).expand(rows, slots)
    context = head.context(batch.aux_BLA.flatten(0, 1), positions_BL.flatten())
    share = all_roots if sample_seed is None else anchor_share
    order_BA = root_order(batch.valid_BA, depth, sample_seed)
    order_BR = order_BA[:, : max(root_count(order_BA.shape[1], 0, share), 1)]
    roots_BR = batch.answers_BA.gather(1, order_BR)
    parts = [_blocks(head, batch, context, part_BR, depth) for part_BR in torch.split(roots_BR, _ROOTS, dim=1)]
    state_BRNE = torch.cat(parts, dim=1)
    for k in range(depth):
        trained_BR = trained_mask(batch.valid_BA, order_BR.shape[1], k, share)
        yield by_slot(state_BRNE[:, :, k + 1], order_BR + k, trained_BR, batch.valid_BA)


def _blocks(
    head: DFlashHead, batch: Batch, context: list[tuple[Tensor, Tensor]], roots_BR: Tensor, depth: int
) -> Tensor:
    """Return the states [B, R, N, E] of the blocks of these roots, given as slot indices."""
    order_N = torch.arange(depth + 1, device=roots_BR.device)
    positions_BRN = roots_BR[:, :, None] + 1 + order_N
    tokens_BR = batch.tokens_BL.gather(1, roots_BR)
    tokens_BRN = torch.where(order_N > 0, head.config.mask_token_id, tokens_BR[:, :, None])
    attend = _BlockAttention(context, roots_BR, depth + 1)
    states: Tensor = head(tokens_BRN.flatten(), positions_BRN.flatten(), attend)
    return states.view(*tokens_BRN.shape, -1)


class _BlockAttention:
    """Attention of blocks over the committed tokens before their roots, and over their own slots."""

    def __init__(self, context: list[tuple[Tensor, Tensor]], roots_BR: Tensor, block: int) -> None:
        self._context, self._roots_BR, self._block = context, roots_BR, block

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return the attended values, see ``layers.Attend``. Token s of a text has the target's state s."""
        shape = (*self._roots_BR.shape, self._block)
        kv_heads = k_TKD.shape[1]
        q = (q_THD * q_THD.shape[-1] ** -0.5).view(*shape, kv_heads, -1, q_THD.shape[-1])
        k, v = (x.view(*shape, *x.shape[1:]) for x in (k_TKD, v_TKD))
        true_k, true_v = (x.view(shape[0], -1, *x.shape[1:]) for x in self._context[layer])
        slots_L = torch.arange(true_k.shape[1], device=q.device)
        hidden_BRL = slots_L > self._roots_BR[:, :, None]
        true = torch.einsum("brnkgd,blkd->brnkgl", q, true_k)
        true = true.masked_fill(hidden_BRL[:, :, None, None, None], float("-inf"))
        own = torch.einsum("brnkgd,brmkd->brnkgm", q, k)
        weights = torch.softmax(torch.cat((true, own), dim=-1), dim=-1)
        split = true.shape[-1]
        out = torch.einsum("brnkgl,blkd->brnkgd", weights[..., :split], true_v)
        out = out + torch.einsum("brnkgm,brmkd->brnkgd", weights[..., split:], v)
        return out.reshape(q_THD.shape)
