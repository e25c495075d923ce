"""KV compaction after verification, as the engine calls it."""

from __future__ import annotations

from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.kv_keep import reference

_MOST_PAIRS = 1024
"""Maximum number of pairs of a group; more do not fit into the registers of one program."""


def kv_keep(cache_L2NPKD: Tensor, source_slots: Tensor, target_slots: Tensor, *, group: int | None = None) -> None:
    """Move cache rows in place as `reference.kv_keep` does, on a GPU in one kernel launch.

    ``group`` promises that pairs overlap only within consecutive groups of that many pairs, as those of one sequence
    do. None means that any pairs may overlap.
    """
    group = len(source_slots) if group is None else group
    if not dispatch.on_gpu(cache_L2NPKD) or group > _MOST_PAIRS:
        reference.kv_keep(cache_L2NPKD, source_slots, target_slots)
        return
    from specdecode_kernels.kv_keep import kernel

    kernel.kv_keep(cache_L2NPKD, source_slots, target_slots, group)
