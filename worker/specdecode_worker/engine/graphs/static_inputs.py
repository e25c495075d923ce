"""What a graph reads and the host writes before each replay: two static tensors, cut into named tables.

The host writes into memory that the device copies from by itself; two such copies take turns, so that the next step
can be written while the one before is still being copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


class Layout:
    """Named tables behind each other in one flat tensor."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = dict(shapes)
        self.size = sum(prod(shape) for shape in self.shapes.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def flat(self, values: Mapping[str, Sequence[float]], dtype: torch.dtype) -> Tensor:
        """On the host."""
        for name, shape in self.shapes.items():
            assert len(values[name]) == prod(shape), f"{name} has {len(values[name])} values of {shape}"
        return torch.tensor([value for name in self.shapes for value in values[name]], dtype=dtype)


class Staged:
    """A static tensor on the device, written by the host."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device_copy = torch.zeros(size, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self._halves = [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def write(self, parts: Sequence[Tensor]) -> None:
        """Queues the copy of these parts, which fill it, behind each other."""
        self._turn = 1 - self._turn
        half, copied = self._halves[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # two steps ago: over, unless the host is far ahead
        torch.cat(list(parts), out=half)
        self.device_copy.copy_(half, non_blocking=True)
        if self.device_copy.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event
