"""Attention without a cache, computed directly from its definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.dflash import DFlashHead


def dense(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return causal attention over the tokens of this pass, computed directly from its definition."""
    groups = q_THD.shape[1] // k_TKD.shape[1]
    k, v = k_TKD.repeat_interleave(groups, dim=1), v_TKD.repeat_interleave(groups, dim=1)
    scores_HQL = torch.einsum("qhd,lhd->hql", q_THD, k) / q_THD.shape[-1] ** 0.5
    future = torch.ones(scores_HQL.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hql,lhd->qhd", scores_HQL.masked_fill(future, -torch.inf).softmax(-1), v)


def block_states(head: DFlashHead, aux_NA: Tensor, tokens_T: Tensor) -> Tensor:
    """Return the states of one block of a DFlash head behind committed tokens with the states ``aux_NA``."""
    context = head.context(aux_NA, torch.arange(len(aux_NA)))

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        k, v = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context[layer], (k_TKD, v_TKD), strict=True))
        return F.scaled_dot_product_attention(q_THD.transpose(0, 1)[None], k, v, enable_gqa=True)[0].transpose(0, 1)

    states: Tensor = head(tokens_T, len(aux_NA) + torch.arange(len(tokens_T)), attend)
    return states
