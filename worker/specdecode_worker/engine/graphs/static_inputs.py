"""Static input tensors of a graph, split into named tables, which the host writes before each replay.

The host writes to pinned memory, from which the copy to the device is asynchronous. Two pinned buffers alternate, so
that the host can write the next step while the previous one is still being copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
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
    """Static tables on the device with two host buffers to write them from."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._device_copy = torch.zeros(layout.size, dtype=dtype, device=device)
        pinned = device.type == "cuda"
        self._halves = [torch.zeros(layout.size, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._tables: list[dict[str, NDArray[Any]]] = [{}, {}]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def views(self) -> dict[str, Tensor]:
        """Return a view of the device's copy for each table."""
        return self._layout.views(self._device_copy)

    def begin(self) -> dict[str, NDArray[Any]]:
        """Return the tables of the host buffer that is written next. ``queue`` copies them to the device."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # A copy queued two writes ago; it rarely blocks.
        tables = self._tables[self._turn]
        if not tables:
            tables |= {name: view.numpy() for name, view in self._layout.views(self._halves[self._turn]).items()}
        return tables

    def write(self, values: Tensor) -> None:
        """Queue the copy of flat values on the host to the first elements of the device's copy."""
        self.begin()
        self._halves[self._turn][: len(values)].copy_(values)
        self.queue(len(values))

    def queue(self, size: int | None = None) -> None:
        """Queue the copy of the first ``size`` elements of the host buffer, None for all."""
        half = self._halves[self._turn]
        self._device_copy[:size].copy_(half[:size], non_blocking=True)
        if self._device_copy.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event
