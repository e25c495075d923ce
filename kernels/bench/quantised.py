"""Matrices with weights of four and eight bits, compared with bf16 and, if installed, torchao.

Many rows are multiplied in every way that `choice.choose` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from timing import DEVICE, buffers, seconds
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels.quantised_linear import dequantise_kernel, kernel, scaled_kernel
from specdecode_kernels.quantised_linear.choice import FEW_ROWS, MOST_TILE_ROWS, fits_scaled
from specdecode_kernels.quantised_linear.reference import KINDS, Kind, Quantised, quantise

Compute = Callable[[Tensor, Quantised], Tensor]
MATRICES = {
    "gate and up": (2 * 14336, 4096),
    "down": (4096, 14336),
    "head": (32_000, 4096),
    "qkv": (6144, 4096),
    "output": (4096, 4096),
}
"""(outputs, inputs) of Llama-3.1-8B and its EAGLE-3 head."""
ROWS = (1, 4, 16, 64, 128, 512, 2048)


def measure(
    name: str, outputs: int, inputs: int, rate: float, dtype: torch.dtype, rows_of: tuple[int, ...] = ROWS
) -> Iterator[dict[str, Any]]:
    """Yield one result for every quantisation and number of rows.

    ``over_roofline`` is the time over that of reading the stored bytes at ``rate`` (bytes per second, 0 if unknown).
    """
    plain = torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) / inputs**0.5
    plains = [plain, *(plain.clone() for _ in range(buffers(plain.nbytes) - 1))]
    weights = {kind: _quantised(plain, kind) for kind in KINDS}
    torchao = _torchao(plain)
    for rows in rows_of:
        x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
        sizes = {"matrix": name, "outputs": outputs, "inputs": inputs, "rows": rows}
        base = seconds(*(partial(F.linear, x, weight) for weight in plains))
        yield sizes | {"weights": "bf16", "microseconds": 1e6 * base} | _over(base, plain.nbytes, rate)
        for kind, copies in weights.items():
            ways = {
                way: seconds(*(partial(compute, x, weight) for weight in copies))
                for way, compute in _ways(kind, outputs, inputs, rows, dtype).items()
            }
            took = min(ways.values())
            row = {"weights": kind, "microseconds": 1e6 * took, "times_bf16": base / took}
            row["ways"] = {way: 1e6 * one for way, one in ways.items()}
            yield sizes | row | _over(took, copies[0].nbytes, rate)
        if torchao is not None:
            took = seconds(partial(torchao, x))
            yield sizes | {"weights": "int4 (torchao)", "microseconds": 1e6 * took, "times_bf16": base / took}


def _ways(kind: Kind, outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> dict[str, Compute]:
    """Return the ways to compute a product on this device, by their names in `choice.Way`."""
    ways: dict[str, Compute] = {}
    # Numpy, which interprets the tiles of a dry run, has no matrix products of bf16.
    interpretable = DEVICE == "cuda" or dtype == torch.float32
    if rows <= MOST_TILE_ROWS and interpretable:
        ways["tile"] = kernel.linear
    if rows > FEW_ROWS:
        ways["dequantised"] = _dequantised
        fp8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
        if fp8 and kind == "fp8" and fits_scaled(outputs, inputs, dtype):
            ways["scaled"] = scaled_kernel.linear
    return ways


def _dequantised(x: Tensor, weight: Quantised) -> Tensor:
    """Return the product by way of the whole matrix in x's type."""
    return F.linear(x, dequantise_kernel.dequantise(weight, x.dtype))


def _quantised(plain: Tensor, kind: Kind) -> list[Quantised]:
    """Return as many copies of the quantised weight as keep each out of the L2 cache."""
    first = quantise(plain, kind)
    return [first, *(quantise(plain, kind) for _ in range(buffers(first.nbytes) - 1))]


def _over(took: float, stored: int, rate: float) -> dict[str, float]:
    return {"over_roofline": took * rate / stored} if rate else {}


def _torchao(plain: Tensor) -> torch.nn.Module | None:
    """Return torchao's int4 weight-only layer, or None if torchao is not installed."""
    try:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_
    except ImportError:
        return None
    layer = torch.nn.Linear(plain.shape[1], plain.shape[0], bias=False, device=DEVICE, dtype=plain.dtype)
    layer.weight = torch.nn.Parameter(plain.clone(), requires_grad=False)
    quantize_(layer, Int4WeightOnlyConfig(group_size=128))
    return layer
