"""Verification as it is called on batches: the walk of coupled sampling, and multi-round sampling without a loop over
sequences. The latter makes the very decisions of the reference: its coins are drawn from the same counters."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels.noise.reference import COIN_STREAM, RESIDUAL_STREAM, gumbel, uniform
from specdecode_kernels.verify.reference import Accepted, walk

__all__ = ["Accepted", "multi_round", "walk"]


def multi_round(
    parents_BN: Tensor,
    tokens_BN: Tensor,
    logp_BNV: Tensor,
    logq_BNV: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
    depth: int,
) -> Accepted:
    """As reference.multi_round for every row of a batch of trees of at most this depth; padding's parent is -1."""
    rows = torch.arange(len(parents_BN), device=parents_BN.device)
    at_B = torch.zeros_like(rows)
    bonus_B = torch.full_like(rows, -1)
    path: list[Tensor] = []
    for level in range(depth + 1):
        here_B = position_B + 1 + level
        alive_B = bonus_B < 0
        p_BV = logp_BNV[rows, at_B].exp()
        q_BV = None if logq_BNV is None else logq_BNV[rows, at_B].exp()
        coins_BN = uniform(seed_B, here_B, parents_BN.shape[1], COIN_STREAM)
        taken_B, p_BV = _try_children(parents_BN, tokens_BN, at_B, p_BV, q_BV, coins_BN)
        stops_B = alive_B & (taken_B < 0)
        drawn_B = (p_BV.log() + gumbel(seed_B, here_B, p_BV.shape[-1], RESIDUAL_STREAM)).argmax(-1)
        bonus_B = torch.where(stops_B, drawn_B, bonus_B)
        goes_B = alive_B & (taken_B >= 0)
        path.append(torch.where(goes_B, taken_B, -1))
        at_B = torch.where(goes_B, taken_B, at_B)
    path_BD = torch.stack(path[:depth], dim=-1) if depth else at_B.new_empty((len(rows), 0))
    return Accepted(path_BD, (path_BD >= 0).sum(-1), bonus_B, at_B)


def _try_children(
    parents_BN: Tensor, tokens_BN: Tensor, at_B: Tensor, p_BV: Tensor, q_BV: Tensor | None, coins_BN: Tensor
) -> tuple[Tensor, Tensor]:
    """(the child accepted at ``at_B``, -1 for none; what is left of p then)."""
    taken_B = torch.full_like(at_B, -1)
    for node in range(1, parents_BN.shape[1]):
        tried_B = (parents_BN[:, node] == at_B) & (taken_B < 0)
        x_B1 = tokens_BN[:, node, None].clamp(min=0)
        p_x = p_BV.gather(1, x_B1)[:, 0]
        chance_B = p_x if q_BV is None else p_x / q_BV.gather(1, x_B1)[:, 0]
        accepts_B = tried_B & (coins_BN[:, node] < chance_B)
        taken_B = torch.where(accepts_B, node, taken_B)
        p_left, q_left = residual(p_BV, q_BV, x_B1)
        refused_B1 = (tried_B & ~accepts_B)[:, None]
        p_BV = torch.where(refused_B1, p_left, p_BV)
        q_BV = q_BV if q_left is None or q_BV is None else torch.where(refused_B1, q_left, q_BV)
    return taken_B, p_BV


def residual(p_BV: Tensor, q_BV: Tensor | None, x_B1: Tensor) -> tuple[Tensor, Tensor | None]:
    """What is left of p, and of q, once x was refused."""
    if q_BV is None:
        p_BV = p_BV.scatter(1, x_B1, 0.0)
    else:
        p_BV = (p_BV - q_BV).clamp(min=0)
        q_BV = q_BV.scatter(1, x_B1, 0.0)
        q_BV = q_BV / q_BV.sum(-1, keepdim=True)
    return p_BV / p_BV.sum(-1, keepdim=True), q_BV
