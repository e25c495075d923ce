"""Tree attention of one layer: time relative to the copy rate, and to FlashInfer's unmasked decode where installed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timing import DEVICE, buffers, seconds
from torch import Tensor

from specdecode_kernels.tree_attention import kernel
from specdecode_kernels.tree_attention.plan import Plan, plan

PAGE = 16


def tree_masks(*children: int) -> list[int]:
    """Return the ancestor mask of every node of a tree with ``children`` per node of each level, root included."""
    masks, level = [1], [1]
    for count in children:
        grown = []
        for parent in level:
            for _ in range(count):
                grown.append(parent | 1 << len(masks))
                masks.append(grown[-1])
        level = grown
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


ONE = tree_masks()
CHAIN = tree_masks(1, 1, 1, 1, 1)
TREES = {6: CHAIN, 21: tree_masks(4, 2, 1), 60: tree_masks(4, 2, 2, 2)[:60]}
"""Masks by number of nodes, root included."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Head counts of a layer; the defaults are those of Llama-3.1-8B."""

    heads: int = 32
    kv: int = 8
    size: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` sequences of ``context`` tokens, each with a tree of ``masks`` and scattered blocks."""

    layer: Layer
    batch: int
    context: int
    masks: list[int]
    q_THD: Tensor
    cache_2NPKD: Tensor
    table_BM: Tensor

    @property
    def bytes_moved(self) -> int:
        """Bytes of one pass: every key and value, the queries and the results, each once."""
        keys = self.batch * (self.context + len(self.masks))
        return 2 * (keys * self.layer.kv * self.layer.size + self.q_THD.numel()) * self.q_THD.itemsize


def case(batch: int, context: int, masks: list[int], layer: Layer) -> Case:
    """Create random queries, keys and values."""
    columns = -(-(context + len(masks)) // PAGE)
    made = {"device": DEVICE, "dtype": layer.dtype}
    return Case(
        layer,
        batch,
        context,
        masks,
        torch.randn(batch * len(masks), layer.heads, layer.size, **made),
        torch.randn(2, batch * columns + 1, PAGE, layer.kv, layer.size, **made),
        torch.randperm(batch * columns, device=DEVICE).view(batch, columns) + 1,
    )


def measure(given: Case, rate: float) -> dict[str, Any]:
    """Measure our kernel. ``rate`` is the copy rate in bytes per second, 0 if unknown."""
    made, caches = _plan(given), _copies(given.cache_2NPKD)
    took = seconds(*(partial(kernel.attend, given.q_THD, cache, made) for cache in caches))
    sizes = {"batch": given.batch, "context": given.context, "nodes": len(given.masks)}
    share = {"share_of_copy_rate": given.bytes_moved / took / rate} if rate else {}
    return {**sizes, "microseconds": 1e6 * took, **share}


def measure_flash_decode(given: Case) -> float | None:
    """Return microseconds of FlashInfer's decode of one token per sequence, or None if it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    layer, columns = given.layer, -(-given.context // PAGE)
    workspace = torch.empty(2**27, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(given.batch + 1, dtype=torch.int32, device=DEVICE) * columns
    pages = given.table_BM[:, :columns].flatten().int()
    last = torch.full((given.batch,), (given.context - 1) % PAGE + 1, dtype=torch.int32, device=DEVICE)
    kinds = {"q_data_type": layer.dtype, "kv_data_type": layer.dtype}
    wrapper.plan(starts, pages, last, layer.heads, layer.kv, layer.size, PAGE, **kinds)
    q = given.q_THD[: given.batch]
    return 1e6 * seconds(*(partial(wrapper.run, q, (cache[0], cache[1])) for cache in _copies(given.cache_2NPKD)))


def _copies(tensor: Tensor) -> list[Tensor]:
    """Return the tensor and as many copies as keep each out of the L2 cache."""
    return [tensor, *(tensor.clone() for _ in range(buffers(tensor.nbytes) - 1))]


def _plan(given: Case) -> Plan:
    batch, nodes = given.batch, len(given.masks)
    return plan(
        query_start=torch.arange(batch + 1, device=DEVICE) * nodes,
        prefix_len_B=torch.full((batch,), given.context, device=DEVICE),
        key_start_B=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        ancestors_T=torch.tensor(given.masks, device=DEVICE).repeat(batch),
        block_table_BM=given.table_BM,
        block_size=PAGE,
        groups=given.layer.heads // given.layer.kv,
        kv_heads=given.layer.kv,
    )
