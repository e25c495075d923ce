"""Communication between the processes of a data-parallel training run.

Gradients are summed over gloo; rank 0's clock decides for all ranks. ``torchrun --nproc-per-node 2 -m specdecode_worker
train ...`` sets the environment variables that ``join`` reads. In a step of ``accumulate`` batches, batch i goes to
rank i modulo the number of ranks, so that the summed gradient equals that of one rank that processes all batches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


class ProcessGroup:
    """Single-process run: every collective operation is a no-op."""

    rank, count = 0, 1

    def take_rank_items(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the part of ``items`` that this rank processes."""
        return items[self.rank :: self.count]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks, in place."""

    def broadcast_seconds(self, seconds: float) -> float:
        """Return rank 0's value of ``seconds`` on every rank."""
        return seconds

    def wait(self) -> None:
        """Block until all ranks have reached this call."""


class GlooProcessGroup(ProcessGroup):
    """One rank of a multi-process run over ``torch.distributed`` with the gloo backend."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks, in place, in one all-reduce."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, summed in zip(tensors, parts, strict=True):
            tensor.copy_(summed.view_as(tensor))

    def broadcast_seconds(self, seconds: float) -> float:
        """Return rank 0's value of ``seconds`` on every rank."""
        rank_0_seconds = torch.tensor([seconds], dtype=torch.float64)
        dist.broadcast(rank_0_seconds, src=0)
        return float(rank_0_seconds)

    def wait(self) -> None:
        """Block until all ranks have reached this call."""
        dist.barrier()


def join() -> ProcessGroup:
    """Return this run's process group: over gloo if ``WORLD_SIZE`` (set by torchrun) is above 1, else of one rank."""
    return GlooProcessGroup() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ProcessGroup()
