"""Choice of how a product with quantised weights is computed on a GPU."""

from __future__ import annotations

from typing import Literal

import torch

from specdecode_kernels import timings
from specdecode_kernels.quantised_linear.reference import Kind

Way = Literal["tile", "scaled", "dequantised"]
"""``tile`` dequantises weights in registers, ``scaled`` multiplies fp8 by fp8 (`torch._scaled_mm`), and ``dequantised``
dequantises the whole matrix and multiplies it by the library."""
FEW_ROWS = 64
"""Rows up to which the tiles are always taken: a row then has the same bits in plain decoding and in a draft's tree."""
ALIGNMENT = 16
"""Outputs and inputs of fp8 products must be multiples of it, which the library requires."""
MOST_TILE_ROWS = 512
"""Maximum number of rows of the tiles."""


def choose(kind: Kind, outputs: int, inputs: int, rows: int, dtype: torch.dtype, *, fp8: bool) -> Way:
    """Return the way for a product of ``rows`` rows of type ``dtype`` with a matrix [outputs, inputs].

    The fastest measured way is taken. Without a measurement it is ``scaled`` where the GPU has fp8 (``fp8``), else
    ``tile`` for up to MOST_TILE_ROWS rows.
    """
    if rows <= FEW_ROWS:
        return "tile"
    ways: list[Way] = []
    if fp8 and kind == "fp8" and fits_scaled(outputs, inputs, dtype):
        ways.append("scaled")
    if rows <= MOST_TILE_ROWS:
        ways.append("tile")
    ways.append("dequantised")
    measured = None
    if dtype == torch.bfloat16:
        measured = timings.fastest(timings.current().products, (kind, outputs, inputs), rows, tuple(ways))
    return next((way for way in ways if way == measured), ways[0])


def fits_scaled(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Return whether fp8 products serve a matrix of this size for rows of this type."""
    return dtype == torch.bfloat16 and outputs % ALIGNMENT == 0 and inputs % ALIGNMENT == 0
