"""The distribution that a request asked for, without the sorts that nobody asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels.sample import reference


def processed(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, *, truncated: bool) -> Tensor:
    """As reference.processed for rows of temperature > 0. ``truncated`` is the host's word that some row cuts."""
    if truncated:
        return reference.processed(logits_RV, temperature_R, top_k_R, top_p_R)
    wide = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    return torch.log_softmax(wide / temperature_R.to(wide.dtype)[:, None], dim=-1)
