"""The best few of a draft's tokens, in plain torch. Suffixes: R rows, V the draft's vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels.noise.reference import gumbel
from specdecode_kernels.sample.reference import processed


def top_k(
    logits_RV: Tensor,
    k: int,
    *,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    vocab_size: int,
    ids_V: Tensor | None = None,
    sharpness: float = 1.0,
    truncation: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """[R, k] target ids, best first: the top of log q + g(seed, position, id), of plain logits where greedy.

    ``ids_V`` maps the draft's vocabulary to the target's, of ``vocab_size`` tokens (None: it is the same).
    ``sharpness`` multiplies the logits of sampled rows, of which ``truncation`` is (top-k, top-p, min-p).
    """
    greedy_R = temperature_R == 0
    nothing = (torch.zeros_like(position_R), torch.ones_like(temperature_R), torch.zeros_like(temperature_R))
    logq_RV = processed(logits_RV * sharpness, torch.where(greedy_R, 1.0, temperature_R), *(truncation or nothing))
    noise_RV = gumbel(seed_R, position_R, vocab_size)
    if ids_V is not None:
        noise_RV = noise_RV[:, ids_V]
    scores_RV = torch.where(greedy_R[:, None], logits_RV.double(), logq_RV + noise_RV)
    best_RK = scores_RV.topk(k, dim=-1).indices
    return best_RK if ids_V is None else ids_V[best_RK]
