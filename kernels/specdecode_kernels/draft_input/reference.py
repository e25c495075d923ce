"""Gathering a draft's input, in plain torch.

Suffixes: T rows, V vocabulary, A width of embeddings, R hidden states that there are, E their width.
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
    """(pair [T, A + E], hidden [T, E]): row t holds the embedding of ``tokens[t]`` and the hidden state
    ``source[t]`` (``t`` without sources), each under the norm whose weights are given (EAGLE-3; without them
    EAGLE-1); beside it the state as it is, which the layer adds to."""
    token_TA = embedding_VA[tokens_T].to(hidden_RE.dtype)
    hidden_TE = hidden_RE if source_T is None else hidden_RE[source_T]
    parts = [
        x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, eps)
        for x, weight in ((token_TA, token_weight_A), (hidden_TE, hidden_weight_E))
    ]
    return torch.cat(parts, dim=-1), hidden_TE
