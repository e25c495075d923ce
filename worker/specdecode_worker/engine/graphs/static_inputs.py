"""Static input tensors of a graph, split into named tables, which the host writes before each replay.

The host writes to pinned memory, from which the copy to the device is asynchronous. Two pinned buffers alternate, so
that the host can write the next step while the previous one is still being copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


class Layout:
    """Layout of named tables, concatenated in one flat tensor. ``size`` is the total number of elements."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = dict(shapes)
        self.size = sum(prod(shape) for shape in self.shapes.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a view of ``flat`` for each table, in the shape of the table."""
        parts = torch.split(flat, [prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def flat(self, values: Mapping[str, Sequence[float]], dtype: torch.dtype) -> Tensor:
        """Return ``values`` of all tables as one flat tensor on the host."""
        for name, shape in self.shapes.items():
            assert len(values[name]) == prod(shape), f"{name} has {len(values[name])} values of {shape}"
        return torch.tensor([value for name in self.shapes for value in values[name]], dtype=dtype)


class StagedTensor:
    """Static tensor on the device (``device_copy``) with two host buffers to write it from."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device_copy = torch.zeros(size, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self._halves = [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def write(self, parts: Sequence[Tensor]) -> None:
        """Concatenate ``parts`` in a host buffer and queue its copy to the first elements of the device tensor."""
        self._turn = 1 - self._turn
        half, copied = self._halves[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # A copy queued two writes ago; it rarely blocks.
        size = sum(map(len, parts))
        torch.cat(list(parts), out=half[:size])
        self.device_copy[:size].copy_(half[:size], non_blocking=True)
        if self.device_copy.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event
