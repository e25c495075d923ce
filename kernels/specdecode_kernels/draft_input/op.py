"""Input of an EAGLE head, as the head calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.draft_input import reference


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
    """Gather the input (pair, hidden) of an EAGLE head as `reference.draft_input` does."""
    given = [x for x in (hidden_RE, embedding_VA, token_weight_A, hidden_weight_E) if x is not None]
    if not dispatch.on_gpu(hidden_RE) or hidden_RE.dtype == torch.float64 or dispatch.learns(*given):
        return reference.draft_input(
            embedding_VA,
            tokens_T,
            hidden_RE,
            source_T,
            token_weight_A=token_weight_A,
            hidden_weight_E=hidden_weight_E,
            eps=eps,
        )
    from specdecode_kernels.draft_input import kernel

    return kernel.draft_input(embedding_VA, tokens_T, hidden_RE, source_T, token_weight_A, hidden_weight_E, eps)
