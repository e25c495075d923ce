"""What keeping accepted nodes does to the paged cache, in plain torch.

A tree's keys and values were written to slots behind the committed prefix, one per node, in node order. After
verification the accepted path's rows move to the front of that region, in path order; for a chain they are there
already. A slot is block * P + offset.
"""

from __future__ import annotations

from torch import Tensor


def kv_keep(cache_L2NPKD: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copies rows ``source_slots[i]`` to ``target_slots[i]`` (int64, same length) in every layer, in place.

    All sources are read before any target is written: paths may overlap their destinations. A pair that is to do
    nothing points both at slot 0, which belongs to the padding block.
    """
    rows = cache_L2NPKD.flatten(2, 3)
    rows[:, :, target_slots] = rows[:, :, source_slots]
