"""What temperature, top-k and top-p make of logits, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def processed(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """[R, V] log-probabilities (fp32 at least), -inf where a token is cut.

    ``temperature`` 0 is greedy: all mass on the first largest logit. ``top_k`` 0 and ``top_p`` 1 cut nothing. Order
    as in vLLM: temperature, then top-k, then top-p over what top-k left. Top-p keeps the fewest tokens, best first,
    whose mass reaches p; ties with the k-th logit are all kept.
    """
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    logits = logits_RV.to(wide)
    greedy_R = temperature_R == 0
    scaled = logits / torch.where(greedy_R, 1.0, temperature_R).to(wide)[:, None]
    kept = _top_p(_top_k(scaled, top_k_R), top_p_R)
    best = torch.full_like(logits, -math.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    return torch.where(greedy_R[:, None], best, torch.log_softmax(kept, dim=-1))


def _top_k(logits_RV: Tensor, top_k_R: Tensor) -> Tensor:
    size = logits_RV.shape[-1]
    k = torch.where((top_k_R <= 0) | (top_k_R > size), size, top_k_R)
    lowest = logits_RV.sort(dim=-1, descending=True).values.gather(-1, (k - 1)[:, None])
    return logits_RV.masked_fill(logits_RV < lowest, -math.inf)


def _top_p(logits_RV: Tensor, top_p_R: Tensor) -> Tensor:
    ordered, order = torch.sort(logits_RV, dim=-1, descending=True, stable=True)
    mass = torch.softmax(ordered, dim=-1)
    before = mass.cumsum(-1) - mass
    cut = (before >= top_p_R[:, None].to(before.dtype)) & (top_p_R < 1)[:, None]
    cut[:, 0] = False
    return logits_RV.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -math.inf)
