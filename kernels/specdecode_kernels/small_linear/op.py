"""Fused product of few rows, as networks call it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.small_linear import reference

MOST_ROWS = 64
"""Maximum number of rows. With more, the library's products are as fast, and compute rather than read."""
MOST_ROWS_OF_OLDER_GPUS = 16
"""The same on GPUs before compute capability 9.0 and from 12.0 on, which lack the shared memory for larger tiles."""
LEAST_OUTPUTS = 2048
"""Fewest outputs of a matrix. One program serves 16 to 64, so a smaller matrix leaves most of a GPU idle."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fits(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Return whether the kernel serves this product. Only sizes and types count, so a captured step can ask."""
    return (
        dispatch.on_gpu(x_TK)
        and x_TK.dim() == 2
        and len(x_TK) <= (MOST_ROWS if dispatch.is_hopper(x_TK) else MOST_ROWS_OF_OLDER_GPUS)
        and len(weight_NK) >= LEAST_OUTPUTS
        and x_TK.dtype in DTYPES
        and weight_NK.dtype == x_TK.dtype
        and not dispatch.learns(x_TK, weight_NK)
    )


def small_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    residual_TN: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute the product as `reference.small_linear` does, on a GPU in one launch. The caller asked `fits`."""
    if not dispatch.on_gpu(x_TK):
        return reference.small_linear(x_TK, weight_NK, bias_N, residual_TN=residual_TN, gated=gated)
    from specdecode_kernels.small_linear import kernel

    return kernel.small_linear(x_TK, weight_NK, bias_N, residual_TN, gated=gated)
