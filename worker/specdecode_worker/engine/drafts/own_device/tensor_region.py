"""Memory that the worker and a draft process share, for the tensors of one message at a time.

The memory belongs to no file system, so the size limit of /dev/shm does not apply, and pages that were never written
take no memory. It is host memory on every device: a draft process that is killed can then not break the device of the
target, as it could if the target's process read memory of the other one's device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import msgspec
import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes that the address of every tensor is a multiple of: a cache line."""


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """Data type and shape of a tensor in a region."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(torch.Size(self.shape).numel()) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Data type as torch names it."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


class TensorRegion:
    """Shared memory of a fixed size. It can be passed to a process that is started with the spawn method."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Create a region of ``size`` bytes, or open the one with this file descriptor, which it then owns."""
        self.size = size
        own = os.memfd_create("specdecode-draft", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._file = os.fdopen(own, "r+b", buffering=0)
        if descriptor is None:
            os.ftruncate(own, size)
        self._bytes = torch.frombuffer(mmap.mmap(own, size), dtype=torch.uint8)

    def __reduce__(self) -> tuple[object, ...]:
        return _open, (self.size, DupFd(self._file.fileno()))

    def put(self, tensors: Sequence[Tensor]) -> tuple[TensorShape, ...]:
        """Copy tensors of any device into the region, and return what `get` needs to find them.

        Tensors of an accelerator are complete when this returns.

        Raises:
            ValueError: The tensors are larger than the region.
        """
        shapes = tuple(TensorShape(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors)
        for target, tensor in zip(self.get(shapes), tensors, strict=True):
            target.copy_(tensor)
        return shapes

    def get(self, shapes: Sequence[TensorShape]) -> list[Tensor]:
        """Return views of the tensors of the last `put`. They are valid until the next one, in either process."""
        views, end = [], 0
        for one in shapes:
            begin, end = end, end + one.nbytes
            if end > self.size:
                raise ValueError(f"the tensors of a message take more than the {self.size} bytes that are shared")
            views.append(self._bytes[begin:end].view(one.torch_dtype).view(one.shape))
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
        return views


def _open(size: int, descriptor: Any) -> TensorRegion:
    return TensorRegion(size, descriptor.detach())
