"""Products of few rows at the sizes of Llama-3.1-8B and its EAGLE-3 head, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels import dependent
from specdecode_kernels.rms_norm import kernel as rms_norm
from specdecode_kernels.small_linear import kernel
from specdecode_kernels.small_linear.op import LEAST_OUTPUTS, fits

CUDA = torch.device("cuda")
MATRICES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128_256, 4096),
    "odd": (LEAST_OUTPUTS + 5, 4097),
}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-6}
"""Largest distance from the fp64 result over its length: the rounding of the result."""


def operands(name: str, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """Return rows, matrix, residual if the matrix has one, and whether it is gated."""
    outputs, inputs = MATRICES[name]
    generator = torch.Generator(CUDA).manual_seed(len(name) + rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=CUDA, dtype=dtype)

    residual = random(rows, outputs) if name in ("output", "down") else None
    return random(rows, inputs), random(outputs, inputs) / inputs**0.5, residual, name == "gate and up"


def error(actual: Tensor, name: str, x: Tensor, weight: Tensor, residual: Tensor | None) -> float:
    """Return the distance from the fp64 result over its length."""
    wanted = torch.cat([F.linear(x.double(), part.double()) for part in weight.split(8192)], -1)
    if name == "gate and up":
        gate, up = wanted.chunk(2, -1)
        wanted = F.silu(gate) * up
    if residual is not None:
        wanted += residual
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 6, 16, 17, 64])
@pytest.mark.parametrize("name", MATRICES)
def test_product(name: str, rows: int, dtype: torch.dtype) -> None:
    """The result is right, has the same bits twice, and each row has the bits that it has alone."""
    x, weight, residual, gated = operands(name, rows, dtype)
    assert fits(x, weight)
    poison = torch.full((rows, len(weight) // (1 + gated)), torch.nan, device=CUDA, dtype=dtype)
    del poison  # the allocator hands the same memory to the result
    actual = kernel.small_linear(x, weight, None, residual, gated=gated)
    assert error(actual, name, x, weight, residual) < TOLERANCE[dtype]
    assert torch.equal(kernel.small_linear(x, weight, None, residual, gated=gated), actual)
    for row in {0, rows - 1}:
        one = slice(row, row + 1)
        alone = kernel.small_linear(x[one], weight, None, None if residual is None else residual[one], gated=gated)
        assert torch.equal(alone[0], actual[row])


@pytest.mark.parametrize("name", ["qkv", "gate and up", "down"])
def test_kernels_that_start_before_the_one_before_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and norms in a row, each reading what the one before wrote, in a graph: as without early starts."""
    x, weight, residual, gated = operands(name, 6, torch.bfloat16)
    square = torch.randn(x.shape[1], x.shape[1], device=CUDA, dtype=x.dtype) / x.shape[1] ** 0.5
    ones = torch.ones(x.shape[1], device=CUDA, dtype=x.dtype)

    def chain() -> Tensor:
        y = x
        for _ in range(6):
            y, _ = rms_norm.rms_norm(kernel.small_linear(y, square, None, None, gated=False), ones, 1e-5, x)
        return kernel.small_linear(y, weight, None, residual, gated=gated)

    monkeypatch.setattr(dependent, "ENABLED", False)
    wanted = chain()
    monkeypatch.setattr(dependent, "ENABLED", True)
    assert torch.equal(chain(), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)
