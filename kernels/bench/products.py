"""Fused products of few rows in several tiles, compared with the library's product and the kernels around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from timing import DEVICE, buffers, seconds
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels.silu_mul import kernel as silu_mul
from specdecode_kernels.small_linear import kernel as small_linear
from specdecode_kernels.small_linear.kernel import Tile

MATRICES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (2 * 14336, 4096),
    "down": (4096, 14336),
    "lm_head": (128_256, 4096),
    "draft qkv": (6144, 8192),
    "draft head": (32_000, 4096),
}
"""(outputs, inputs) of Llama-3.1-8B and an EAGLE-3 head."""
ROWS = (1, 6, 16, 32, 64)
SWEPT_ROWS = (1, 6, 32, 64)
TILES = (
    Tile(16, 512, 4, 2),
    Tile(16, 512, 6, 2),
    Tile(16, 1024, 4, 2),
    Tile(32, 256, 3, 4),
    Tile(32, 512, 4, 4),
    Tile(32, 512, 5, 4),
    Tile(32, 512, 7, 4),
    Tile(64, 256, 4, 4),
    Tile(64, 256, 5, 8),
    Tile(64, 512, 3, 4),
    Tile(64, 512, 4, 8),
    Tile(128, 256, 4, 8),
)
"""Tiles to compare with those in use."""


def measure(
    name: str, outputs: int, inputs: int, rate: float, dtype: torch.dtype, rows: int, tiles: tuple[Tile, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the times of a product and what follows it in a layer: fused, by the library, and the bare product.

    ``over_roofline`` is the fused time, ``bare_over_roofline`` that of the library's product alone, over that of
    reading the matrix at ``rate`` (bytes per second, 0 if unknown). A row of kind "tile" follows for each of ``tiles``.
    """
    count = buffers(outputs * inputs * dtype.itemsize)
    weights = [torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) / inputs**0.5 for _ in range(count)]
    x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
    ways = [_ways(name, x, weight) for weight in weights]
    bare, base = seconds(*(partial(F.linear, x, weight) for weight in weights)), seconds(*(way[1] for way in ways))
    row: dict[str, Any] = {"matrix": name, "outputs": outputs, "inputs": inputs, "rows": rows}
    read = rate / weights[0].nbytes
    took = seconds(*(way[0] for way in ways))
    times = {"microseconds": 1e6 * took, "bare_microseconds": 1e6 * bare, "library_microseconds": 1e6 * base}
    over = {"over_roofline": took * read, "bare_over_roofline": bare * read} if rate else {}
    yield {"kind": "product", **row, **times, "over_library": took / base, **over}
    for tile in tiles:
        try:
            took = seconds(*(partial(way[0], tile=tile) for way in ways))
        except triton.runtime.errors.OutOfResources:
            continue
        over = {"over_roofline": took * read} if rate else {}
        yield {"kind": "tile", **row, "tile": _described(tile), "microseconds": 1e6 * took, **over}


def measure_all(
    rate: float,
    dtype: torch.dtype,
    matrices: dict[str, tuple[int, int]],
    rows: tuple[int, ...],
    swept: tuple[int, ...],
    tiles: tuple[Tile, ...],
) -> Iterator[dict[str, Any]]:
    """Yield the results of every matrix and number of rows, with ``tiles`` for those in ``swept``."""
    for name, (outputs, inputs) in matrices.items():
        for count in rows:
            yield from measure(name, outputs, inputs, rate, dtype, count, tiles if count in swept else ())


def _described(tile: Tile) -> str:
    return f"{tile.outputs} x {tile.row_bytes} B, {tile.stages} stages, {tile.warps} warps"


def _ways(name: str, x: Tensor, weight: Tensor) -> tuple[Callable[..., object], Callable[[], object]]:
    """Return the fused product and the library's, each with the gate or residual that the matrix has."""
    if name in ("output", "down"):
        residual = torch.zeros(len(x), len(weight), device=x.device, dtype=x.dtype)
        return (
            partial(small_linear.small_linear, x, weight, None, residual, gated=False),
            lambda: residual + F.linear(x, weight),
        )
    if name == "gate and up":
        return (
            partial(small_linear.small_linear, x, weight, None, None, gated=True),
            lambda: silu_mul.silu_mul(F.linear(x, weight)),
        )
    return partial(small_linear.small_linear, x, weight, None, None, gated=False), lambda: F.linear(x, weight)
