"""Keeping accepted nodes, as the engine calls it."""

from __future__ import annotations

from specdecode_kernels.kv_keep.reference import kv_keep

__all__ = ["kv_keep"]
