"""Products of rows with the matrix of their expert, as networks call them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.grouped_linear import reference
from specdecode_kernels.grouped_linear.reference import Groups

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fits(weight: Tensor) -> bool:
    """Return whether the kernels serve matrices like this one, so that those of a layer are worth stacking."""
    return dispatch.on_gpu(weight) and weight.dtype in DTYPES


def group(logits_TX: Tensor) -> Groups:
    """Group the rows of a pass by expert, as `reference.group` does."""
    if not dispatch.on_gpu(logits_TX):
        return reference.group(logits_TX)
    from specdecode_kernels.grouped_linear import kernel

    return kernel.group(logits_TX)


def grouped_linear(
    x_TK: Tensor,
    weight_XNK: Tensor,
    groups: Groups,
    *,
    scored: bool = False,
    gated: bool = False,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute the product as `reference.grouped_linear` does, on a GPU in one launch. The caller asked `fits`."""
    if not dispatch.on_gpu(x_TK):
        return reference.grouped_linear(x_TK, weight_XNK, groups, scored=scored, gated=gated, residual_TN=residual_TN)
    from specdecode_kernels.grouped_linear import kernel

    return kernel.grouped_linear(x_TK, weight_XNK, groups, residual_TN, scored=scored, gated=gated)
