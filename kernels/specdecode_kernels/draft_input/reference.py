"""Reference implementation of the input of an EAGLE head in plain PyTorch.

Tensor suffixes: T rows, V vocabulary, A width of embeddings, R available hidden states, E their width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def draft_input(
    embedding_VA: Tensor,
    tokens_T: Tensor,
    hidden_RE: Tensor,
    source_T: Tensor | None = None,
    *,
    token_weight_A: Tensor | None = None,
    hidden_weight_E: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return (pair [T, A + E], hidden [T, E]).

    Row t of the pair holds the embedding of ``tokens[t]`` and hidden state ``source[t]`` (state t without sources).
    Each half is normed if its weights are given (EAGLE-3), else copied (EAGLE-1). ``hidden`` is the state without a
    norm, the residual that the layer adds to.
    """
    token_TA = embedding_VA[tokens_T].to(hidden_RE.dtype)
    hidden_TE = hidden_RE if source_T is None else hidden_RE[source_T]
    parts = [
        x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, eps)
        for x, weight in ((token_TA, token_weight_A), (hidden_TE, hidden_weight_E))
    ]
    return torch.cat(parts, dim=-1), hidden_TE
