"""Reference implementation of draft proposals in plain PyTorch.

Tensor suffixes: R rows, V vocabulary of the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels.noise.reference import gumbel
from specdecode_kernels.sample.reference import Truncation, processed


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
) -> Tensor:
    """Return k target token ids per row, [R, k], best first.

    Sampled rows take the top of log q + g(seed, position, id), greedy rows the top of the plain logits.

    Args:
        logits_RV: Logits of the draft.
        k: Number of proposals.
        temperature_R: Temperatures; 0 is greedy.
        seed_R: Seeds of the requests.
        position_R: Absolute positions of the proposed tokens.
        vocab_size: Size of the target's vocabulary.
        ids_V: Target id of each draft token (None: the vocabularies are the same).
        sharpness: Factor of the logits of sampled rows.
        truncation: Parameters of sampled rows.
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
