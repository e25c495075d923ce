"""Noise kernel, interpreted, against the reference, which is tested against published vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdecode_kernels.noise import kernel, op, reference
from support.kernels.interpreted import Plant

pytestmark = pytest.mark.usefixtures("poisoned")

SEEDS = torch.tensor([0, 2**40 + 3, 2**63 - 1, 17])
POSITIONS = torch.tensor([0, 2**33 + 7, 5, 2**32 - 1])


def close(actual: Tensor, wanted: Tensor) -> bool:
    """Return whether the noise agrees up to the last bits of a logarithm. A wrong word would change it completely."""
    return torch.allclose(actual, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize("vocab_size", [1, 7, 63, 64, 100, 1003])
def test_noise_equals_the_reference(vocab_size: int, stream: int) -> None:
    actual = kernel.gumbel(SEEDS, POSITIONS, vocab_size, stream, block=256)
    assert close(actual, reference.gumbel(SEEDS, POSITIONS, vocab_size, stream))


@pytest.mark.usefixtures("on_kernels")
def test_the_op_runs_the_kernel() -> None:
    actual = op.gumbel(SEEDS, POSITIONS, 5000)
    assert close(actual, reference.gumbel(SEEDS, POSITIONS, 5000))
    assert op.gumbel(SEEDS[:0], POSITIONS[:0], 5000).shape == (0, 5000)


BUGS: dict[str, tuple[str, str]] = {
    "a round too few": ("tl.static_range(10)", "tl.static_range(9)"),
    "words in another order": (
        "tl.interleave(c0, c2), tl.interleave(c1, c3)",
        "tl.interleave(c0, c1), tl.interleave(c2, c3)",
    ),
    "the high half of the seed is dropped": ("k1 = ((seed >> 32) & 0xFFFFFFFF)", "k1 = (0 * (seed >> 32))"),
    "the high half of the position is dropped": ("((position >> 32) & 0xFFFFFFFF)", "(0 * position)"),
    "one stream for all": ("zero + stream", "zero + 0 * stream"),
    "keys of the round do not move": ("k0.to(tl.uint64) + 0x9E3779B9", "k0.to(tl.uint64)"),
    "every block draws the first one's": ("start // 4 + tl.arange", "tl.arange"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    wanted = reference.gumbel(SEEDS, POSITIONS, 100, 1)
    assert close(kernel.gumbel(SEEDS, POSITIONS, 100, 1, block=64), wanted)
    assert not close(plant(kernel, *BUGS[bug]).gumbel(SEEDS, POSITIONS, 100, 1, block=64), wanted)
