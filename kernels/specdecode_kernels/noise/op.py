"""Gumbel noise as the engine draws it: the numbers of the reference, computed faster on a CPU.

On a CPU, large rows are drawn one by one: the buffers of one row stay in the processor cache, while those of several
rows would go through memory at more than twice the cost per row. The last rows are kept, because a step needs the same
ones twice: for the proposals of the draft and for the choice of the target.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.noise import reference
from specdecode_kernels.noise.reference import GUMBEL_STREAM, LOW, MULTIPLIER, ROUNDS, WEYL

LARGE = 4096
"""Vocabulary size from which the work of one row costs more than one iteration of a Python loop."""
_KEPT_ROWS = 64
"""Rows of noise that a CPU keeps; those of 128,256 tokens take 66 MB."""


def gumbel(seed_R: Tensor, position_R: Tensor, vocab_size: int, stream: int = GUMBEL_STREAM) -> Tensor:
    """Draw Gumbel noise [R, V] in fp64 as `reference.gumbel` does.

    The numbers are equal bit for bit on a CPU, and up to the last bits of a logarithm on a GPU.
    """
    if dispatch.on_gpu(seed_R):
        from specdecode_kernels.noise import kernel

        return kernel.gumbel(seed_R, position_R, vocab_size, stream)
    if seed_R.device.type != "cpu" or vocab_size < LARGE:
        return reference.gumbel(seed_R, position_R, vocab_size, stream)
    noise_RV = torch.empty(len(seed_R), vocab_size, dtype=torch.float64)
    for noise_V, seed, position in zip(noise_RV, seed_R.tolist(), position_R.tolist(), strict=True):
        noise_V.copy_(gumbel_row(seed, position, vocab_size, stream))
    return noise_RV


@lru_cache(maxsize=_KEPT_ROWS)
def gumbel_row(seed: int, position: int, vocab_size: int, stream: int = GUMBEL_STREAM) -> Tensor:
    """Return one row of `gumbel` [V] on a CPU. The result is kept for later calls and must not be modified."""
    words = _words(torch.arange(-(-vocab_size // 4)), seed, position, stream)
    uniform = torch.stack(words, dim=-1).flatten()[:vocab_size].to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def _words(quad_Q: Tensor, seed: int, position: int, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `reference.philox` of the counters (quad, position low, position high, stream).

    The mask of a low word is applied only at the end, since until then it is only xored and the result masked.
    """
    rest = torch.tensor([position & LOW, (position >> 32) & LOW, stream])
    c0, (c1, c2, c3) = quad_Q, rest.unbind()
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIER[0], c2 * MULTIPLIER[1]
        c0, c1, c2, c3 = _xored(p1, c1, k0), p1, _xored(p0, c3, k1), p0
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1 & LOW, c2, c3 & LOW


def _xored(product: Tensor, word: Tensor, key: int) -> Tensor:
    """Return the high word of a product, xored with a counter word and a key word."""
    high = product >> 32
    high = high.bitwise_xor_(word) if high.dim() >= word.dim() else high ^ word
    return high.bitwise_xor_(key).bitwise_and_(LOW)
