"""Ranks of a split target as threads, whose collectives exchange tensors in memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class ThreadRanks:
    """Collectives between threads: each thread stores its tensor, waits for all others and reads every tensor."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._meet = threading.Barrier(size, timeout=30)
        self._left: dict[int, Tensor] = {}
        self._own = threading.local()

    def run(self, work: Any) -> list[Any]:
        def as_rank(rank: int) -> Any:
            self._own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(as_rank, range(self._size)))

    def all_reduce(self, tensor: Tensor) -> None:
        parts = self._exchange(tensor)
        tensor.copy_(torch.stack(parts).sum(0))

    def gather(self, tensor: Tensor, gather_list: list[Tensor] | None, dst: int) -> None:
        parts = self._exchange(tensor)
        for place, part in zip(gather_list or [], parts, strict=False):
            place.copy_(part)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._left[self._own.rank] = tensor.clone()
        self._meet.wait()
        parts = [self._left[rank] for rank in range(self._size)]
        self._meet.wait()
        return parts
