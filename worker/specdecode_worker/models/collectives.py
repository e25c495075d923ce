"""Collectives of the ranks of a replica, which a rank can leave out while it rehearses a step alone.

The ranks of a replica must call the same collectives in the same order. A rank that fails between two of them would
leave the others waiting. Before all ranks run a step that they have never run, each of them therefore rehearses it
without collectives, which finds what can fail on one rank alone: kernels to compile, and memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Leave out all collectives of the block. Its results are then wrong, but finite and of the right shapes."""
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


def all_reduce(tensor: Tensor) -> None:
    """Replace ``tensor`` by the sum of those of all ranks."""
    if not _rehearsing.get():
        dist.all_reduce(tensor)


def broadcast(tensor: Tensor) -> None:
    """Replace ``tensor`` by that of rank 0."""
    if not _rehearsing.get():
        dist.broadcast(tensor, src=0)


def send_to_first(tensor: Tensor) -> None:
    """Send ``tensor`` to rank 0, which calls `gather`."""
    if not _rehearsing.get():
        dist.gather(tensor, None, dst=0)


def gather(own: Tensor, ranks: int) -> Tensor:
    """Return the tensors of all ranks, stacked in front: [ranks, ...]. Rank 0 calls this."""
    if _rehearsing.get():
        return own.expand(ranks, *own.shape)
    gathered = own.new_empty(ranks, *own.shape)
    dist.gather(own, list(torch.unbind(gathered)), dst=0)
    return gathered
