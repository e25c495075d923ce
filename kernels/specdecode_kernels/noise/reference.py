"""Philox 4x32-10 (Salmon et al., SC 2011) and Gumbel noise derived from it, in plain PyTorch on int64.

The noise of a request at absolute position i for token v depends only on (seed, i, v, stream). It does not depend on
the draft, the tree, the batch or the device state, so speculation does not change the text.

Tensor suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
"""Philox 4x32 round multipliers."""
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Philox 4x32 key increments per round."""
LOW = 0xFFFFFFFF
"""Mask of the low 32 bits."""
ROUNDS = 10
"""Number of Philox rounds."""

NOISE_VERSION = 1
"""Version of the noise. Raise it with every change that gives other numbers for the same seed, position and token."""
GUMBEL_STREAM = 0
"""Stream of the Gumbel noise of the emitted token."""
COIN_STREAM = 1
"""Stream of the uniform coins of multi-round sampling: one per (position, node), never used twice."""
RESIDUAL_STREAM = 2
"""Stream of the Gumbel noise of the token drawn from the residual after all children of a node were rejected."""
PROPOSAL_STREAM = 3
"""Stream of the Gumbel noise of the proposals that multi-round sampling draws from the draft."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit outputs (in int64) of Philox for broadcastable 32-bit counters and keys."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps modulo 2^64, so an arithmetic shift and a mask give the high word of an unsigned product.
        p0, p1 = c0 * MULTIPLIER[0], c2 * MULTIPLIER[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & LOW) ^ c1 ^ k0,
            p1 & LOW,
            ((p0 >> 32) & LOW) ^ c3 ^ k1,
            p0 & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def uniform(seed_R: Tensor, position_R: Tensor, vocab_size: int, stream: int) -> Tensor:
    """Return uniform numbers [R, V], fp64 in the open interval (0, 1).

    Row r uses (seed[r], position[r]). Token v takes word v mod 4 of the counter (v div 4, position low, position high,
    stream); the key is the seed.
    """
    device = seed_R.device
    quad = torch.arange(-(-vocab_size // 4), device=device)[None, :]
    position, seed = position_R[:, None], seed_R[:, None]
    words = philox(
        (quad, position & LOW, (position >> 32) & LOW, torch.full_like(position, stream)),
        (seed & LOW, (seed >> 32) & LOW),
    )
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


def gumbel(seed_R: Tensor, position_R: Tensor, vocab_size: int, stream: int = GUMBEL_STREAM) -> Tensor:
    """Return standard Gumbel noise [R, V] in fp64.

    The argmax of log-probabilities plus this noise is a sample of the distribution.
    """
    return -torch.log(-torch.log(uniform(seed_R, position_R, vocab_size, stream)))
