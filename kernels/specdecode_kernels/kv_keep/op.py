"""Keeping accepted nodes, as the engine calls it."""

from __future__ import annotations

from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.kv_keep import reference

_MOST_PAIRS = 1024
"""More do not fit the registers of a program."""


def kv_keep(cache_L2NPKD: Tensor, source_slots: Tensor, target_slots: Tensor, *, group: int | None = None) -> None:
    """As reference.kv_keep. ``group`` is the caller's word that pairs overlap at most within runs of so many, as those
    of one sequence do; None: any may."""
    group = len(source_slots) if group is None else group
    if not dispatch.on_gpu(cache_L2NPKD) or group > _MOST_PAIRS:
        reference.kv_keep(cache_L2NPKD, source_slots, target_slots)
        return
    from specdecode_kernels.kv_keep import kernel

    kernel.kv_keep(cache_L2NPKD, source_slots, target_slots, group)
