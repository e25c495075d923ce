"""Residual sum and RMS norm, as models call them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.rms_norm import reference


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute (normed, summed) over the last dimension as `reference.rms_norm` does, with any leading dimensions."""
    if not dispatch.on_gpu(x_TE) or x_TE.dtype == torch.float64 or dispatch.learns(x_TE, weight_E):
        return reference.rms_norm(x_TE, weight_E, eps, residual_TE)
    from specdecode_kernels.rms_norm import kernel

    residual_RE = None if residual_TE is None else residual_TE.flatten(0, -2)
    normed_RE, summed_RE = kernel.rms_norm(x_TE.flatten(0, -2), weight_E, eps, residual_RE)
    return normed_RE.view(x_TE.shape), summed_RE.view(x_TE.shape)
