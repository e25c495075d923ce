"""Products of rows with the matrix of their expert, as networks call them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.grouped_linear import reference
from specdecode_kernels.grouped_linear.reference import Groups
from specdecode_kernels.quantised_linear.reference import Quantised

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fits(weight: Tensor | Quantised) -> bool:
    """Return whether the kernels serve matrices like this one, so that those of a layer are worth stacking."""
    if isinstance(weight, Quantised):
        return dispatch.on_gpu(weight.packed_NB)
    return dispatch.on_gpu(weight) and weight.dtype in DTYPES


def group(logits_TX: Tensor) -> Groups:
    """Group the rows of a pass by expert, as `reference.group` does."""
    if not dispatch.on_gpu(logits_TX):
        return reference.group(logits_TX)
    from specdecode_kernels.grouped_linear import kernel

    return kernel.group(logits_TX)


def grouped_linear(
    x_TK: Tensor,
    matrices: Tensor | Quantised,
    groups: Groups,
    *,
    scored: bool = False,
    gated: bool = False,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """Compute the product as `reference.grouped_linear` does, on a GPU in one launch. The caller asked `fits`."""
    if not dispatch.on_gpu(x_TK):
        return reference.grouped_linear(x_TK, matrices, groups, scored=scored, gated=gated, residual_TN=residual_TN)
    from specdecode_kernels.grouped_linear import kernel

    if isinstance(matrices, Quantised) and matrices.order_K is not None:
        x_TK, matrices = x_TK.index_select(1, matrices.order_K), replace(matrices, order_K=None)
    return kernel.grouped_linear(x_TK, matrices, groups, residual_TN, scored=scored, gated=gated)
