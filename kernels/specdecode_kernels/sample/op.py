"""The distribution that a request asked for, without the sorts that nobody asked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def processed(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, *, truncated: bool) -> Tensor:
    """As reference.processed for rows of temperature > 0. ``truncated`` is the host's word that some row cuts."""
    wide = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    scaled = wide / temperature_R.to(wide.dtype)[:, None]
    return torch.log_softmax(_cut(scaled, top_k_R, top_p_R) if truncated else scaled, dim=-1)


def _cut(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Top-k, then top-p over what it left: one sort serves both, since what top-k cuts stands last already. The sort
    is most of what sampling costs on a CPU; a partial one would break ties otherwise in other batches."""
    size = logits_RV.shape[-1]
    ordered, order = torch.sort(logits_RV, dim=-1, descending=True, stable=True)
    k_R = torch.where((top_k_R <= 0) | (top_k_R > size), size, top_k_R)
    kept = ordered.masked_fill(ordered < ordered.gather(-1, (k_R - 1)[:, None]), -math.inf)
    mass = torch.softmax(kept, dim=-1)
    cut = (mass.cumsum(-1) - mass >= top_p_R[:, None].to(mass.dtype)) & (top_p_R < 1)[:, None]
    cut[:, 0] = False
    return torch.empty_like(logits_RV).scatter_(-1, order, kept.masked_fill_(cut, -math.inf))
