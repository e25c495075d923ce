"""Fused products of few rows, compared with the library's product and the kernels around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from timing import DEVICE, buffers, seconds
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels.rms_norm import kernel as rms_norm
from specdecode_kernels.silu_mul import kernel as silu_mul
from specdecode_kernels.small_linear import kernel as small_linear
from specdecode_kernels.small_linear.op import MOST_ROWS
from specdecode_kernels.small_linear.reference import InputNorm

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
ROWS = (1, 2, 4, 6, 8, 16, 64)


def measure(name: str, outputs: int, inputs: int, rate: float, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """Return the times of a product and what surrounds it in a layer: fused, by the library, and the bare product.

    ``over_roofline`` is the fused time, ``bare_over_roofline`` that of the library's product alone, over that of
    reading the matrix at ``rate`` (bytes per second, 0 if unknown). More than ``MOST_ROWS`` rows are not fused.
    """
    count = buffers(outputs * inputs * dtype.itemsize)
    weights = [torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) / inputs**0.5 for _ in range(count)]
    x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
    ways = [_ways(name, x, weight) for weight in weights]
    bare, base = seconds(*(partial(F.linear, x, weight) for weight in weights)), seconds(*(way[1] for way in ways))
    row: dict[str, Any] = {"matrix": name, "outputs": outputs, "inputs": inputs, "rows": rows}
    row |= {"bare_microseconds": 1e6 * bare, "library_microseconds": 1e6 * base}
    read = rate / weights[0].nbytes
    if rate:
        row["bare_over_roofline"] = bare * read
    if rows <= MOST_ROWS:
        took = seconds(*(way[0] for way in ways))
        row |= {"microseconds": 1e6 * took, "over_library": took / base}
        row |= {"over_roofline": took * read} if rate else {}
    return row


def measure_all(
    rate: float, dtype: torch.dtype, matrices: dict[str, tuple[int, int]], rows: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Yield one result for every matrix and number of rows."""
    for name, (outputs, inputs) in matrices.items():
        for count in rows:
            yield measure(name, outputs, inputs, rate, dtype, count)


def _ways(name: str, x: Tensor, weight: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the fused product and the library's, each with the norm, gate or residual that the matrix has."""
    norm = InputNorm(torch.ones(x.shape[1], device=x.device, dtype=x.dtype), 1e-5)
    if name in ("output", "down"):
        residual = torch.zeros(len(x), len(weight), device=x.device, dtype=x.dtype)
        return (
            lambda: small_linear.small_linear(x, weight, None, None, residual, gated=False),
            lambda: residual + F.linear(x, weight),
        )
    if name == "gate and up":
        return (
            lambda: small_linear.small_linear(x, weight, None, norm, None, gated=True),
            lambda: silu_mul.silu_mul(F.linear(rms_norm.rms_norm(x, norm.weight_K, norm.eps)[0], weight)),
        )
    return (
        lambda: small_linear.small_linear(x, weight, None, norm, None, gated=False),
        lambda: F.linear(rms_norm.rms_norm(x, norm.weight_K, norm.eps)[0], weight),
    )
