"""Rotary embedding and KV cache write in one call, as attention on the paged cache uses it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.rope_cache import reference
from specdecode_kernels.rope_cache.reference import UNSCALED, Scales


def rope_cache(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cache_2NPKD: Tensor,
    scales: Scales = UNSCALED,
) -> Tensor:
    """Rotate queries and keys and write keys and values to the cache as `reference.rope_cache` does.

    Returns the rotated queries [T, H, D].
    """
    arguments = (q_THD, k_TKD, v_TKD, cos_PD, sin_PD, positions_T, slots_T, cache_2NPKD, scales)
    if not dispatch.on_gpu(q_THD) or q_THD.dtype == torch.float64:
        return reference.rope_cache(*arguments)
    from specdecode_kernels.rope_cache import kernel

    return kernel.rope_cache(*arguments)
