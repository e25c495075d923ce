"""Draft proposals in one call, from logits to token ids."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.sample import op as sample
from specdecode_kernels.sample.reference import Truncation


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
    truncation: Truncation | None = None,
    noise_RV: Tensor | None = None,
) -> Tensor:
    """Propose k target token ids per row, [R, k], best first, as `reference.top_k` does.

    On a GPU the noise is fp32: tokens with scores that differ by less than 1e-4 may change places. Truncation applies
    to the k best tokens alone, and puts tokens last instead of dropping them. This can cost a proposal, but never
    changes the text. On a CPU rows of a large vocabulary are processed one by one, and greedy ones not at all; others
    may bring their noise if it was drawn before.
    """
    if not dispatch.on_gpu(logits_RV) and sample.is_large(logits_RV):
        best_RK = logits_RV.topk(k, dim=-1).indices
        sharp_RV = logits_RV if sharpness == 1 else logits_RV * sharpness
        sampled = sample.sampled_scores(sharp_RV, temperature_R, seed_R, position_R, truncation, ids_V, vocab_size)
        for row, scores_V in sampled:
            best_RK[row] = scores_V.topk(k).indices
        return best_RK if ids_V is None else ids_V[best_RK]
    if not dispatch.on_gpu(logits_RV) or logits_RV.dtype == torch.float64:
        rows = temperature_R, seed_R, position_R, truncation
        scores_RV = sample.scores(logits_RV, *rows, ids_V, vocab_size, noise_RV, sharpness)
        best_RK = scores_RV.topk(k, dim=-1).indices
        return best_RK if ids_V is None else ids_V[best_RK]
    from specdecode_kernels.top_k import kernel

    return kernel.top_k(logits_RV, k, temperature_R, seed_R, position_R, ids_V, sharpness, truncation)
