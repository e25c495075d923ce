"""Compiled CPU operations over tensors: bf16 with fp32 sums, rounded once at every result.

The result of a row depends neither on the other rows nor on the number of threads; see linear.h and attention.h.

Tensor suffixes: T rows, E hidden size, H query heads, K key-value heads, D head dimension, B sequences, M blocks.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.cpu.matrix import CMatrix, Matrix, pointer
from specdecode_kernels.cpu.native import library

HEAD_SIZES = (32, 64, 96, 128)
"""Head dimensions for which attention is compiled."""


class CNorm(ctypes.Structure):
    """C structure `Norm` of exports.cpp."""

    _fields_ = (("weight", c_void_p), ("eps", c_float))


class CHeads(ctypes.Structure):
    """C structure `Heads` of attention.h."""

    _fields_ = (("queries", c_int64), ("keys", c_int64), ("size", c_int64))


class CEntry(ctypes.Structure):
    """C structure `Entry` of exports.cpp."""

    _fields_ = (("qkv", CMatrix), ("norm", CNorm), ("head_norm", c_void_p), ("head_eps", c_float), ("heads", CHeads))


class CTail(ctypes.Structure):
    """C structure `Tail` of exports.cpp."""

    _fields_ = (("o", CMatrix), ("gate_up", CMatrix), ("down", CMatrix), ("norm", CNorm))


class CPaged(ctypes.Structure):
    """C structure `Paged` of attention.h."""

    _fields_ = (
        *(("keys", c_void_p), ("values", c_void_p), ("block_table", c_void_p)),
        *(("blocks", c_int64), ("block_size", c_int64)),
        *(("prefix", c_void_p), ("first", c_void_p), ("query_start", c_void_p), ("ancestors", c_void_p)),
        ("sequences", c_int64),
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """Number of query heads and of key-value heads, and the head dimension."""

    queries: int
    keys: int
    size: int

    @property
    def c(self) -> CHeads:
        """The same as a C structure."""
        return CHeads(self.queries, self.keys, self.size)


class Linear:
    """Linear layer y = x W^T + b."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix, self._c = matrix, matrix.c
        self._run = _native().sd_linear

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return x W^T + b for rows of the last dimension."""
        x = x_TE if x_TE.stride(-1) == 1 and x_TE.dim() == 2 else x_TE.reshape(-1, self._matrix.inputs).contiguous()
        y = x.new_empty(len(x), self._matrix.outputs)
        self._run(byref(self._c), x.data_ptr(), x.stride(0), len(x), y.data_ptr(), torch.get_num_threads())
        return y.view(*x_TE.shape[:-1], -1)


class Norm:
    """Root mean square norm over the last dimension."""

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        self._weight, self._c = weight_E, CNorm(pointer(weight_E), eps)
        self._run = _native().sd_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of every row of the last dimension."""
        x, size = x.contiguous(), len(self._weight)
        y = torch.empty_like(x)
        self._run(byref(self._c), x.data_ptr(), x.numel() // size, size, y.data_ptr(), torch.get_num_threads())
        return y


class Entry:
    """First part of a decoder block: from its input to rotated queries, rotated keys, and values.

    Applies the norm of ``norm_weight`` (if given), one joined projection, the norms of heads [H + K, D] (if given), and
    rotary embedding in half-split layout.
    """

    def __init__(
        self,
        qkv: Matrix,
        heads: Heads,
        *,
        norm_weight: Tensor | None,
        norm_eps: float,
        head_norm_HD: Tensor | None,
        head_eps: float,
    ) -> None:
        assert qkv.outputs == (heads.queries + 2 * heads.keys) * heads.size
        assert heads.size in HEAD_SIZES
        self._owners = (qkv, norm_weight, head_norm_HD)  # keep alive the memory that the C struct points to
        self._heads = heads
        self._normed = norm_weight is not None
        self._c = CEntry(qkv.c, CNorm(pointer(norm_weight), norm_eps), pointer(head_norm_HD), head_eps, heads.c)
        self._run = _native().sd_entry

    def __call__(self, x_TE: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, K, D], as views of one tensor.

        ``rope`` is (cos, sin), each [T, 1, D].
        """
        x_TE = x_TE.contiguous()
        rows, queries, keys = len(x_TE), self._heads.queries, self._heads.keys
        normed = torch.empty_like(x_TE) if self._normed else x_TE
        out = x_TE.new_empty(rows, queries + 2 * keys, self._heads.size)
        cos, sin = rope
        self._run(
            *(byref(self._c), x_TE.data_ptr(), rows, cos.data_ptr(), sin.data_ptr()),
            *(normed.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )
        return out[:, :queries], out[:, queries : queries + keys], out[:, queries + keys :]


class Tail:
    """Last part of a decoder block: x = residual + attended Wo, then x + down(SiLU(gate) * up) of the norm of x."""

    def __init__(self, o: Matrix, gate_up: Matrix, down: Matrix, *, norm_weight: Tensor, norm_eps: float) -> None:
        self._owners = (o, gate_up, down, norm_weight)  # keep alive the memory that the C struct points to
        self._c = CTail(o.c, gate_up.c, down.c, CNorm(pointer(norm_weight), norm_eps))
        self._size, self._width = o.outputs, down.inputs
        self._run = _native().sd_tail

    def __call__(self, attended_THD: Tensor, residual_TE: Tensor) -> Tensor:
        """Return the output of the block, [T, E]."""
        attended, residual = attended_THD.contiguous(), residual_TE.contiguous()
        rows = len(residual)
        x, normed, out = residual.new_empty(3, rows, self._size).unbind(0)
        inner = residual.new_empty(rows, self._width)
        self._run(
            *(byref(self._c), attended.data_ptr(), residual.data_ptr(), rows),
            *(x.data_ptr(), normed.data_ptr(), inner.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )
        return out


@dataclass(frozen=True, slots=True)
class Pages:
    """Paged-cache metadata of one attention pass, shared by all layers. Int64 on the CPU.

    ``first_B`` is the number of the oldest keys that are hidden; ``ancestors_T`` is as in tree_attention.reference.
    """

    block_table_BM: Tensor
    block_size: int
    prefix_len_B: Tensor
    first_B: Tensor
    query_start: Tensor
    ancestors_T: Tensor


def attends(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Return whether ``attend`` supports a cache of this type, device and head dimension."""
    return dtype == torch.bfloat16 and device.type == "cpu" and head_dim in HEAD_SIZES and library() is not None


def attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache_2NPKD: Tensor, slots_T: Tensor, pages: Pages, scale: float
) -> Tensor:
    """Write keys and values to their slots, then return attended values [T, H, D].

    Equals tree_attention.reference with all keys in the cache.
    """
    if q_THD.stride() != (k_TKD.stride(0), q_THD.shape[2], 1) or k_TKD.stride() != v_TKD.stride():
        joined = torch.cat((q_THD, k_TKD, v_TKD), dim=1)
        queries, end = q_THD.shape[1], q_THD.shape[1] + k_TKD.shape[1]
        q_THD, k_TKD, v_TKD = joined[:, :queries], joined[:, queries:end], joined[:, end:]
    rows, queries, size = q_THD.shape
    out = q_THD.new_empty(rows, queries, size)
    table = pages.block_table_BM
    paged = CPaged(
        *(cache_2NPKD[0].data_ptr(), cache_2NPKD[1].data_ptr(), table.data_ptr(), table.shape[1], pages.block_size),
        *(pages.prefix_len_B.data_ptr(), pages.first_B.data_ptr(), pages.query_start.data_ptr()),
        *(pages.ancestors_T.data_ptr(), table.shape[0]),
    )
    heads = CHeads(queries, k_TKD.shape[1], size)
    _native().sd_attend(
        *(byref(paged), byref(heads), q_THD.data_ptr(), k_TKD.data_ptr(), v_TKD.data_ptr(), q_THD.stride(0)),
        *(slots_T.data_ptr(), rows, scale, out.data_ptr(), torch.get_num_threads()),
    )
    return out


def _native() -> ctypes.CDLL:
    native = library()
    assert native is not None
    return native
