"""Gumbel noise as the engine draws it: the reference's numbers, exactly."""

from __future__ import annotations

from torch import Tensor

from specdecode_kernels.noise import reference


def gumbel(seed_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """[R, V] fp64, equal to reference.gumbel bit for bit."""
    return reference.gumbel(seed_R, position_R, vocab_size)
