"""Asynchronous copies of results from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Completion of a group of copies to the host."""

    event: torch.cuda.Event | None = None
    """CUDA event recorded after the copies; None if nothing has to be copied."""

    def wait(self) -> None:
        """Wait for these copies, but not for work that was queued after them."""
        if self.event is not None:
            self.event.synchronize()


def to_host(tensors: Sequence[Tensor], *, overwritten: bool = False) -> tuple[list[Tensor], HostCopy]:
    """Queue copies of device tensors to pinned host memory.

    Args:
        tensors: Tensors of one device. CPU tensors are returned as they are.
        overwritten: The tensors may be overwritten before the copies are read, so that CPU tensors are cloned.

    Returns:
        The copies, valid after ``HostCopy.wait``, and that ``HostCopy``.
    """
    if not tensors or not tensors[0].is_cuda:
        return [tensor.clone() if overwritten else tensor for tensor in tensors], HostCopy()
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copies, HostCopy(event)
