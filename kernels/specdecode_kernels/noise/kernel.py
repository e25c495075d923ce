"""Philox and Gumbel noise inside Triton kernels, and a kernel that writes noise to memory.

Words and uniform numbers equal the reference bit for bit; Gumbel noise equals it up to the last bits of two fp64
logarithms. `verify` and `top_k` draw their noise in registers with these functions, so it never passes through memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def words(seed, position, stream, quad_Q):
    """Return the Philox words of counters ``quad_Q`` in order of tokens, [4 * Q] uint32. Scalars are int64."""
    zero = tl.zeros_like(quad_Q).to(tl.uint32)
    c0, c3 = quad_Q.to(tl.uint32), zero + stream
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = (p1 & 0xFFFFFFFF).to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = (p0 & 0xFFFFFFFF).to(tl.uint32)
        k0 = ((k0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((k1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def exact_gumbel(bits):
    """Return the Gumbel noise of the reference, in fp64."""
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def quick_gumbel(bits):
    """Return Gumbel noise in fp32, within 2e-5 of the exact noise.

    Near 1, where the fp32 logarithm keeps no relative precision, a series in the distance to 1 replaces it.
    """
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = ((0xFFFFFFFF - bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = w * (1.0 + w * (0.5 + w * (0.33333334 + w * (0.25 + w * (0.2 + w * 0.16666667)))))
    return -tl.log(tl.where(w < 0.0625, series, -tl.log(tl.minimum(u, 0.95))))


@triton.jit(do_not_specialize=["seed_R", "position_R", "stream"])
def _gumbel_kernel(seed_R, position_R, out_RV, vocab_size, stream, BLOCK: tl.constexpr):
    """Write one block of one row of noise."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    quad = start // 4 + tl.arange(0, BLOCK // 4)
    noise = exact_gumbel(words(tl.load(seed_R + row), tl.load(position_R + row), stream, quad))
    token = start + tl.arange(0, BLOCK)
    tl.store(out_RV + row * vocab_size + token, noise, mask=token < vocab_size)


def gumbel(seed_R: Tensor, position_R: Tensor, vocab_size: int, stream: int, *, block: int = BLOCK) -> Tensor:
    """Draw Gumbel noise [R, V] in fp64 as `reference.gumbel` does."""
    out_RV = torch.empty(len(seed_R), vocab_size, dtype=torch.float64, device=seed_R.device)
    if out_RV.numel():
        grid = (len(seed_R), triton.cdiv(vocab_size, block))
        _gumbel_kernel[grid](seed_R.contiguous(), position_R.contiguous(), out_RV, vocab_size, stream, BLOCK=block)
    return out_RV
