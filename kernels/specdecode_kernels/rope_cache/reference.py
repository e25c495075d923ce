"""Reference implementation of rotary embedding and KV cache write in plain PyTorch.

Tensor suffixes: T packed tokens, H query heads, K key-value heads, D head dimension, P positions, N blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0


class Scales(NamedTuple):
    """Factors of the keys and the values of one layer that are stored in fp8: a key is its number times ``key``."""

    key: float
    value: float


UNSCALED = Scales(1.0, 1.0)


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
    """Return the rotated queries [T, H, D]; write rotated keys, and values, to their slots of one layer's cache.

    The halves of a head form pairs (layout of Hugging Face): (a, b) becomes (a cos - b sin, b cos + a sin), in fp32 at
    least. The two halves of a row of the tables are equal. Slot s is position s mod P of block s div P. If several
    tokens have the same slot, which only padding has, the row of any of them remains. A cache in fp8 gets the nearest
    numbers under ``scales``, the largest one for those beyond it.
    """
    cos_T1D, sin_T1D = cos_PD[positions_T][:, None], sin_PD[positions_T][:, None]
    write(cache_2NPKD, slots_T, _rotated(k_TKD, cos_T1D, sin_T1D), v_TKD, scales)
    return _rotated(q_THD, cos_T1D, sin_T1D)


def write(cache_2NPKD: Tensor, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor, scales: Scales) -> None:
    """Write keys and values to slots of one layer's cache."""
    for x_TKD, rows_RKD, scale in zip((k_TKD, v_TKD), cache_2NPKD.flatten(1, 2), scales, strict=True):
        if cache_2NPKD.dtype == FP8:
            wide_TKD = x_TKD.to(torch.promote_types(x_TKD.dtype, torch.float32)) * (1 / scale)
            numbers_TKD = wide_TKD.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)
            rows_RKD.view(torch.uint8).index_copy_(0, slots_T, numbers_TKD.view(torch.uint8))
        else:
            rows_RKD.index_copy_(0, slots_T, x_TKD.to(cache_2NPKD.dtype))


def _rotated(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate heads by the angles of their tokens."""
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    a, b = x_THD.to(wide).chunk(2, dim=-1)
    turned = torch.cat((-b, a), dim=-1)
    return (x_THD.to(wide) * cos_T1D + turned * sin_T1D).to(x_THD.dtype)
