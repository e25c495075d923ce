"""Walking drafted trees, as the engine calls it."""

from __future__ import annotations

from specdecode_kernels.verify.reference import Accepted, walk

__all__ = ["Accepted", "walk"]
