"""Attention without a cache, computed directly from its definition."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return causal attention over the tokens of this pass, computed directly from its definition."""
    groups = q_THD.shape[1] // k_TKD.shape[1]
    k, v = k_TKD.repeat_interleave(groups, dim=1), v_TKD.repeat_interleave(groups, dim=1)
    scores_HQL = torch.einsum("qhd,lhd->hql", q_THD, k) / q_THD.shape[-1] ** 0.5
    future = torch.ones(scores_HQL.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hql,lhd->qhd", scores_HQL.masked_fill(future, -torch.inf).softmax(-1), v)
