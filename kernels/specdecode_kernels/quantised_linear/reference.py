"""Weight-only quantisation and products with quantised weights in plain PyTorch (README.md).

Tensor suffixes: T rows, K inputs, N outputs, G groups of inputs, B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["int4", "int8", "fp8"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GROUPS = (128, 64, 32)
"""Group sizes of int4: the largest that divides the number of inputs, else the last, with padding zeros."""
_LARGEST = {"int8": 127.0, "fp8": 448.0}
"""Largest absolute level of each per-row format."""
ZERO = 8
"""Integer of int4 that stands for 0 in a matrix without zero points."""
LOW_SCALE = 32.0
"""Factor of the low part of `split`."""
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Fractions of a group's range that int4 tries as the scale: clipping rare outliers makes the other levels finer."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised matrix [N, K].

    ``packed_NB`` is int8 or float8_e4m3fn [N, K]. For int4 it holds bytes [N, K' / 2], where K' is the number of inputs
    padded to whole groups. Byte j of a group holds input j in its low half and input j + group / 2 in its high half,
    each as an integer from 0 to 15.

    ``scale_NG`` [N, G] is of any float type: one scale for each ``group`` inputs of a row. The last group may be
    shorter for int8 and fp8; ``group`` is ``columns`` if a row has one scale.
    """

    kind: Kind
    packed_NB: Tensor
    scale_NG: Tensor
    columns: int
    group: int
    zero_NG: Tensor | None = None
    """Integers of int4 that stand for 0, in uint8; None if all are ``ZERO``."""
    order_K: Tensor | None = None
    """Input that each stored column multiplies (GPTQ's act-order); None if columns are stored in order."""

    @property
    def rows(self) -> int:
        """Number of outputs, N."""
        return self.packed_NB.shape[0]

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        tensors = (self.packed_NB, self.scale_NG, self.zero_NG, self.order_K)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def group_of(columns: int) -> int:
    """Return the int4 group size for a number of inputs."""
    return next((group for group in GROUPS if columns % group == 0), GROUPS[-1])


def stored_bytes(rows: int, columns: int, kind: Kind) -> int:
    """Return the size in bytes of a quantised matrix."""
    if kind != "int4":
        return rows * (columns + 4)
    groups = -(-columns // group_of(columns))
    return rows * groups * (group_of(columns) // 2 + 2)


def quantise(weight_NK: Tensor, kind: Kind) -> Quantised:
    """Quantise a matrix, every row by itself (int4: every group).

    Because of that, matrices may be joined by rows before or after quantisation with the same result.
    """
    wide_NK = weight_NK.detach().float()
    if kind == "int4":
        return _int4(wide_NK)
    most_N1 = wide_NK.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * 2**10)
    scale_N1 = most_N1 / _LARGEST[kind]
    scaled_NK = wide_NK / scale_N1
    packed = scaled_NK.round().to(torch.int8) if kind == "int8" else scaled_NK.to(torch.float8_e4m3fn)
    return Quantised(kind, packed, scale_N1, wide_NK.shape[1], wide_NK.shape[1])


def _int4(wide_NK: Tensor) -> Quantised:
    """Quantise a matrix to int4."""
    rows, columns = wide_NK.shape
    group = group_of(columns)
    values_NGK = F.pad(wide_NK, (0, -columns % group)).reshape(rows, -1, group)
    scale_NG = _best_scale(values_NGK)
    levels_NGK = _levels(values_NGK, scale_NG).add(ZERO).to(torch.uint8)
    return Quantised("int4", pack_int4(levels_NGK), scale_NG, columns, group)


def pack_int4(levels_NGK: Tensor) -> Tensor:
    """Return the bytes of integers from 0 to 15 in groups, as `Quantised` stores them."""
    low, high = levels_NGK.chunk(2, dim=-1)
    return (low | high << 4).flatten(1)


def _best_scale(values_NGK: Tensor) -> Tensor:
    """Return, among the tried scales of each group, the one with the least squared error.

    The scale carries a sign, so that level -8 represents the weight of largest magnitude.
    """
    at_NG1 = values_NGK.abs().argmax(-1, keepdim=True)
    widest_NG = values_NGK.gather(-1, at_NG1).squeeze(-1) / -8
    best_NG, least_NG = widest_NG.bfloat16(), torch.full_like(widest_NG, torch.inf)
    for shrink in _SHRINKS:
        tried_NG = (widest_NG * shrink).bfloat16()
        wrong_NGK = _levels(values_NGK, tried_NG) * tried_NG.float()[..., None] - values_NGK
        wrong_NG = wrong_NGK.square().sum(-1)
        best_NG = torch.where(wrong_NG < least_NG, tried_NG, best_NG)
        least_NG = torch.minimum(wrong_NG, least_NG)
    return best_NG


def _levels(values_NGK: Tensor, scale_NG: Tensor) -> Tensor:
    """Return the nearest levels, -8 to 7, of weights under the scales of their groups; 0 for scale 0."""
    scale_NG1 = scale_NG.float()[..., None]
    return torch.where(scale_NG1 == 0, 0.0, values_NGK / scale_NG1).round().clamp(-8, 7)


def dequantise(weight: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix [N, K] in ``dtype``: a product in fp32, rounded once more if ``dtype`` is narrower."""
    levels_NK = weight.packed_NB.float()
    if weight.kind == "int4":
        bytes_NGB = weight.packed_NB.reshape(weight.rows, -1, weight.group // 2)
        zero_NG1 = ZERO if weight.zero_NG is None else weight.zero_NG.float()[..., None]
        levels_NK = (torch.cat((bytes_NGB & 15, bytes_NGB >> 4), dim=-1).float() - zero_NG1).flatten(1)
    scale_NK = weight.scale_NG.float()
    if weight.group < weight.columns:
        scale_NK = scale_NK.repeat_interleave(weight.group, dim=1)[:, : levels_NK.shape[1]]
    values_NK = (levels_NK * scale_NK)[:, : weight.columns].to(dtype).contiguous()
    return values_NK if weight.order_K is None else values_NK[:, weight.order_K.argsort()]


def linear(x_TK: Tensor, weight: Quantised, bias_N: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [T, N], in x's type: exact weights, sums in fp32 at least, rounded once."""
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    out_TN = F.linear(x_TK.to(wide), dequantise(weight, wide), None if bias_N is None else bias_N.to(wide))
    return out_TN.to(x_TK.dtype)


def split(x_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows of bf16 into two e4m3 matrices without loss: x = scale (high + low / LOW_SCALE).

    A number of bf16 has 8 significant bits. ``high`` has the upper 4 and ``low`` the remaining ones. The scale of a row
    is the power of 2 that moves its largest number to between 128 and 256. Numbers below 2^-14 of the largest one may
    be wrong by 2^-22 of it.

    Returns:
        ``high`` and ``low`` [T, K] in float8_e4m3fn, and ``scale`` [T] in fp32.
    """
    most_T = x_TK.abs().amax(1).float()
    exponent_T = torch.frexp(most_T.clamp(2.0**-100)).exponent.clamp(max=121) - 8
    scale_T = torch.ldexp(torch.ones_like(most_T), exponent_T)
    scaled_TK = x_TK.float() / scale_T[:, None]
    high_TK = scaled_TK.to(torch.float8_e4m3fn)
    low_TK = ((scaled_TK - high_TK.float()) * LOW_SCALE).to(torch.float8_e4m3fn)
    return high_TK, low_TK, scale_T
