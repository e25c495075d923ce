"""Weight matrices in the panel layout of the compiled operations, and the C structures that point to them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.cpu.native import library

PANEL = 32
"""Number of outputs in a panel; equals PANEL of linear.h."""
_HUGE = 2**21
"""Size of a huge page in bytes."""


class CMatrix(ctypes.Structure):
    """C structure `Matrix` of linear.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed weight matrix.

    ``panels`` is [panels, inputs / 2, 32, 2] bf16, with zeros after the last output.
    """

    panels: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int

    @property
    def c(self) -> CMatrix:
        """C structure with pointers into ``panels`` and ``bias``, valid as long as this object lives."""
        return CMatrix(self.panels.data_ptr(), pointer(self.bias), self.outputs, self.inputs)


def pointer(x: Tensor | None) -> int | None:
    """Return the data address of a tensor, or None."""
    return None if x is None else x.data_ptr()


def packable(weight: Tensor) -> bool:
    """Return whether a weight matrix can be packed: bf16 on the CPU with an even number of inputs."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0


def pack(weight_NK: Tensor, bias_N: Tensor | None = None) -> Matrix:
    """Pack a weight matrix: bf16 on the CPU, an even number of inputs."""
    native = library()
    assert native is not None
    assert packable(weight_NK)
    outputs, inputs = weight_NK.shape
    panels = _huge((-(-outputs // PANEL), inputs // 2, PANEL, 2))
    source = weight_NK.detach().contiguous()
    native.sd_pack(source.data_ptr(), outputs, inputs, panels.data_ptr())
    return Matrix(panels, None if bias_N is None else bias_N.detach().contiguous(), outputs, inputs)


def pack_gated(gate_IE: Tensor, up_IE: Tensor, gate_I: Tensor | None = None, up_I: Tensor | None = None) -> Matrix:
    """Pack both matrices of a gated MLP as one: a panel holds 16 gates, then the 16 ups that they are multiplied with.

    ``gate_I`` and ``up_I`` are the biases of the two matrices: both, or none.
    """
    return pack(_interleaved(gate_IE, up_IE), None if gate_I is None or up_I is None else _interleaved(gate_I, up_I))


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return rows of both matrices in alternating groups of 16, each group padded with zeros."""
    width, half = len(gate), PANEL // 2
    both = gate.new_zeros(-(-width // half), 2, half, *gate.shape[1:])
    for i, start in enumerate(range(0, width, half)):
        for place, rows in enumerate((gate.detach()[start : start + half], up.detach()[start : start + half])):
            both[i, place, : len(rows)] = rows
    return both.flatten(0, 2)


def _huge(shape: tuple[int, ...]) -> Tensor:
    """Allocate a bf16 tensor in memory of its own, on huge pages if the system provides them.

    All weights are read in every step. With 4 KiB pages, a fifth of that time goes into address translation.
    """
    size = 2 * math.prod(shape)
    length = -(-size // _HUGE) * _HUGE if size >= _HUGE else size
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL of a Linux without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2).view(shape)
