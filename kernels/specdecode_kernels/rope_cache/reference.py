"""Reference implementation of rotary embedding and KV cache write in plain PyTorch.

Tensor suffixes: T packed tokens, H query heads, K key-value heads, D head dimension, P positions, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_cache(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cache_2NPKD: Tensor,
) -> Tensor:
    """Return the rotated queries [T, H, D]; write rotated keys, and values, to their slots of one layer's cache.

    The halves of a head form pairs (layout of Hugging Face): (a, b) becomes (a cos - b sin, b cos + a sin), in fp32 at
    least. The two halves of a row of the tables are equal. Slot s is position s mod P of block s div P. If several
    tokens have the same slot, which only padding has, the row of any of them remains.
    """
    cos_T1D, sin_T1D = cos_PD[positions_T][:, None], sin_PD[positions_T][:, None]
    k_RKD, v_RKD = cache_2NPKD.flatten(1, 2)
    k_RKD[slots_T] = _rotated(k_TKD, cos_T1D, sin_T1D).to(cache_2NPKD.dtype)
    v_RKD[slots_T] = v_TKD.to(cache_2NPKD.dtype)
    return _rotated(q_THD, cos_T1D, sin_T1D)


def _rotated(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate heads by the angles of their tokens."""
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    a, b = x_THD.to(wide).chunk(2, dim=-1)
    turned = torch.cat((-b, a), dim=-1)
    return (x_THD.to(wide) * cos_T1D + turned * sin_T1D).to(x_THD.dtype)
