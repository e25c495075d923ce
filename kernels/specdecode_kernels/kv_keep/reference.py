"""Reference implementation of KV compaction after verification, in plain PyTorch.

The keys and values of a tree were written to slots after the committed prefix, one per node, in node order. After
verification, the rows of the accepted path move to the front of that region, in path order; for a chain they are
already there. A slot is block * P + offset.

Tensor suffixes: L layers, 2 keys and values, N blocks, P positions of a block, K key-value heads, D head dimension.
"""

from __future__ import annotations

from torch import Tensor


def kv_keep(cache_L2NPKD: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy cache rows ``source_slots[i]`` to ``target_slots[i]`` in every layer, in place (int64, same length).

    All sources are read before any target is written, because a path may overlap its destination. A pair that must not
    move anything has both slots 0, which belongs to the padding block.
    """
    rows = cache_L2NPKD.flatten(2, 3)
    rows[:, :, target_slots] = rows[:, :, source_slots]
