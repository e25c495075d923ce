"""The processes of a data-parallel run: gradients are summed over gloo, and rank 0's clock is everybody's.

``torchrun --nproc-per-node 2 -m specdecode_worker train ...`` sets what ``join`` reads. A step of ``accumulate``
batches gives batch i to rank i modulo the number of ranks, so that the sum is that of one rank that takes them all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


class Peers:
    """One process by itself."""

    rank, count = 0, 1

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of ``items`` that this rank works on."""
        return items[self.rank :: self.count]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor over the ranks, in place."""

    def agree(self, seconds: float) -> float:
        """What rank 0 says."""
        return seconds

    def wait(self) -> None:
        """Until all ranks are here."""


class Gloo(Peers):
    """One of several processes."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def add(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, summed in zip(tensors, parts, strict=True):
            tensor.copy_(summed.view_as(tensor))

    def agree(self, seconds: float) -> float:
        said = torch.tensor([seconds], dtype=torch.float64)
        dist.broadcast(said, src=0)
        return float(said)

    def wait(self) -> None:
        dist.barrier()


def join() -> Peers:
    """The other processes of this run, if the environment names any (``WORLD_SIZE``, as torchrun sets it)."""
    return Gloo() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Peers()
