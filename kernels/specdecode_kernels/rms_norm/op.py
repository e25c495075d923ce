"""Residual sum and norm, as models call it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.rms_norm import reference


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As reference.rms_norm."""
    if not dispatch.on_gpu(x_TE) or x_TE.dtype == torch.float64:
        return reference.rms_norm(x_TE, weight_E, eps, residual_TE)
    from specdecode_kernels.rms_norm import kernel

    return kernel.rms_norm(x_TE, weight_E, eps, residual_TE)
