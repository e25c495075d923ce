"""Batched verification of draft trees: choice of the target's tokens, and multi-round sampling.

Multi-round sampling makes exactly the decisions of the reference, since its coins come from the same counters, without
a loop over sequences. On a GPU both operations run as kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.noise.op import gumbel
from specdecode_kernels.noise.reference import COIN_STREAM, RESIDUAL_STREAM, uniform
from specdecode_kernels.sample import op as sample
from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.verify.reference import Accepted


def choose(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    truncation: Truncation | None = None,
    noise_RV: Tensor | None = None,
) -> Tensor:
    """Choose the tokens [R] of plain decoding as `reference.chosen_tokens` does.

    On a GPU the logits are read once, and no probabilities or noise are stored. On a CPU rows of a large vocabulary are
    processed one by one, and greedy ones not at all; others may bring their noise if it was drawn before.
    """
    if not dispatch.on_gpu(logits_RV) and sample.is_large(logits_RV):
        chosen_R = logits_RV.argmax(-1)
        for row, scores_V in sample.sampled_scores(logits_RV, temperature_R, seed_R, position_R, truncation):
            chosen_R[row] = scores_V.argmax()
        return chosen_R
    if not dispatch.on_gpu(logits_RV) or logits_RV.dtype == torch.float64:
        scores_RV = sample.scores(logits_RV, temperature_R, seed_R, position_R, truncation, noise_RV=noise_RV)
        return scores_RV.argmax(-1)
    from specdecode_kernels.sample.kernel import cuts
    from specdecode_kernels.verify import kernel

    row_cuts = None if truncation is None else cuts(logits_RV, temperature_R, truncation)
    return kernel.choose(logits_RV, temperature_R, seed_R, position_R, row_cuts)


def multi_round(
    parents_BN: Tensor,
    tokens_BN: Tensor,
    logp_BNV: Tensor,
    logq_BNV: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
    depth: int,
    *,
    drawn_BN: Tensor | None = None,
    width: int | None = None,
) -> Accepted:
    """Run multi-round sampling on a batch of trees; every row gets the decisions of `reference.multi_round`.

    Args:
        parents_BN: Parent of each node; -1 for the root and for padding.
        tokens_BN: Token of each node.
        logp_BNV: Log-probabilities of the target after each node.
        logq_BNV: Log-probabilities of the draft, or None if all children are deterministic.
        seed_B: Seed of each request.
        position_B: Absolute position of each root.
        depth: Maximum depth of the trees.
        drawn_BN: Mask of the nodes with children drawn from ``logq_BNV`` (None: all). Children of other nodes are
            deterministic.
        width: Maximum number of children of a node (None: any number).
    """
    width = parents_BN.shape[1] - 1 if width is None else width
    if dispatch.on_gpu(parents_BN):
        from specdecode_kernels.verify import rounds

        if logq_BNV is not None and drawn_BN is None:
            drawn_BN = torch.ones(logq_BNV.shape[:2], dtype=torch.bool, device=logq_BNV.device)
        return rounds.multi_round(parents_BN, tokens_BN, logp_BNV, logq_BNV, seed_B, position_B, depth, drawn_BN, width)
    rows = torch.arange(len(parents_BN), device=parents_BN.device)
    children_BNW = _children(parents_BN, width)
    at_B = torch.zeros_like(rows)
    bonus_B = torch.full_like(rows, -1)
    path: list[Tensor] = []
    for level in range(depth + 1):
        here_B = position_B + 1 + level
        alive_B = bonus_B < 0
        p_BV = logp_BNV[rows, at_B].exp()
        q_BV = None if logq_BNV is None else logq_BNV[rows, at_B].exp()
        if q_BV is not None and drawn_BN is not None:
            q_BV = q_BV.masked_fill(~drawn_BN[rows, at_B, None], 0.0)
        coins_BN = uniform(seed_B, here_B, parents_BN.shape[1], COIN_STREAM)
        taken_B, p_BV = _try_children(children_BNW[rows, at_B], tokens_BN, p_BV, q_BV, coins_BN)
        stops_B = alive_B & (taken_B < 0)
        drawn_B = (p_BV.log() + gumbel(seed_B, here_B, p_BV.shape[-1], RESIDUAL_STREAM)).argmax(-1)
        bonus_B = torch.where(stops_B, drawn_B, bonus_B)
        goes_B = alive_B & (taken_B >= 0)
        path.append(torch.where(goes_B, taken_B, -1))
        at_B = torch.where(goes_B, taken_B, at_B)
    path_BD = torch.stack(path[:depth], dim=-1) if depth else at_B.new_empty((len(rows), 0))
    return Accepted(path_BD, (path_BD >= 0).sum(-1), bonus_B)


def _children(parents_BN: Tensor, width: int) -> Tensor:
    """Return the children of every node in order of rank, [B, N, W], padded with -1."""
    nodes = parents_BN.shape[1]
    same_BNN = (parents_BN[:, :, None] == parents_BN[:, None, :]).tril(-1)
    rank_BN = same_BNN.sum(-1)
    children = parents_BN.new_full((len(parents_BN), nodes + 1, max(width, 1)), -1)
    node_BN = torch.arange(nodes, device=parents_BN.device).expand_as(parents_BN)
    row_BN = torch.arange(len(parents_BN), device=parents_BN.device)[:, None].expand_as(parents_BN)
    # The root and padding nodes are stored as children of the extra last row, which is never read.
    parent_BN = torch.where(parents_BN < 0, nodes, parents_BN)
    children[row_BN, parent_BN, rank_BN.clamp(max=children.shape[2] - 1)] = node_BN
    return children[:, :nodes]


def _try_children(
    children_BW: Tensor, tokens_BN: Tensor, p_BV: Tensor, q_BV: Tensor | None, coins_BN: Tensor
) -> tuple[Tensor, Tensor]:
    """Try the children of one node per tree; return (accepted child or -1, remaining p)."""
    taken_B = torch.full_like(children_BW[:, 0], -1)
    for child_B in children_BW.unbind(1):
        tried_B = (child_B >= 0) & (taken_B < 0)
        child_B1 = child_B.clamp(min=0)[:, None]
        x_B1 = tokens_BN.gather(1, child_B1).clamp(min=0)
        p_x = p_BV.gather(1, x_B1)[:, 0]
        # A child with q(x) = 0 was not drawn from q, so it counts as deterministic.
        q_x = torch.zeros_like(p_x) if q_BV is None else q_BV.gather(1, x_B1)[:, 0]
        chance_B = torch.where(q_x > 0, p_x / q_x, p_x)
        accepts_B = tried_B & (coins_BN.gather(1, child_B1)[:, 0] < chance_B)
        taken_B = torch.where(accepts_B, child_B, taken_B)
        p_left, q_left = residual(p_BV, q_BV, x_B1)
        refused_B1 = (tried_B & ~accepts_B)[:, None]
        p_BV = torch.where(refused_B1, p_left, p_BV)
        q_BV = q_BV if q_left is None or q_BV is None else torch.where(refused_B1, q_left, q_BV)
    return taken_B, p_BV


def residual(p_BV: Tensor, q_BV: Tensor | None, x_B1: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the remaining p and q, normalised, after x was rejected."""
    without_x = p_BV.scatter(1, x_B1, 0.0)
    if q_BV is None:
        return normalised(without_x, p_BV), None
    drawn_B1 = q_BV.gather(1, x_B1) > 0
    left = torch.where(drawn_B1, (p_BV - q_BV).clamp(min=0), without_x)
    q_left = q_BV.scatter(1, x_B1, 0.0)
    return normalised(left, p_BV), normalised(q_left, q_left)


def normalised(x_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    """Divide rows by their sum; a row with sum 0 after rounding falls back to ``otherwise_BV``."""
    total_B1 = x_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, x_BV / total_B1, otherwise_BV)
