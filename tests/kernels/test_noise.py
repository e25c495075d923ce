"""Noise: Philox against its published vectors and Python integers. tests/lossless/test_law.py has what is drawn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor

from specdecode_kernels.noise import op, reference

Words = tuple[int, int, int, int]

# Known answers of philox4x32-10: (counter, key, output), from the test vectors published by Random123.
KNOWN: list[tuple[Words, tuple[int, int], Words]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.one_of(st.integers(0, 10_000), st.integers(0, 2**40))


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Compute the ten rounds on Python integers, which never overflow."""
    (a, b, c, d), (k, l) = counter, key
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k, y % 2**32, (x >> 32) ^ d ^ l, x % 2**32
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32
    return a, b, c, d


def uniform(seed: int, position: int, token: int, stream: int) -> float:
    counter = (token // 4, position % 2**32, position // 2**32, stream)
    return (philox(counter, (seed % 2**32, seed // 2**32))[token % 4] + 0.5) / 2**32


def of(words: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([word]) for word in words)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_matches_the_published_vectors(counter: Words, key: tuple[int, int], output: Words) -> None:
    words = reference.philox(of(counter), of(key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == output == philox(counter, key)


@settings(max_examples=60, deadline=None)
@given(SEEDS, POSITIONS, st.integers(1, 23), st.sampled_from((0, 1, 2)))
def test_each_number_depends_on_its_seed_position_token_and_stream(
    seed: int, position: int, vocab: int, stream: int
) -> None:
    actual = reference.uniform(torch.tensor([seed]), torch.tensor([position]), vocab, stream)
    assert actual[0].tolist() == [uniform(seed, position, token, stream) for token in range(vocab)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=6), st.integers(1, 37))
def test_op_equals_the_reference_bit_for_bit_and_rows_are_independent(rows: list[tuple[int, int]], vocab: int) -> None:
    seeds, positions = torch.tensor(rows).unbind(1)
    actual = op.gumbel(seeds, positions, vocab)
    assert torch.equal(actual, reference.gumbel(seeds, positions, vocab))
    for i, (seed, position) in enumerate(rows):
        wanted = [-math.log(-math.log(uniform(seed, position, token, 0))) for token in range(vocab)]
        torch.testing.assert_close(actual[i], torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_uniform_is_uniform_and_neighbours_are_independent() -> None:
    positions = torch.arange(4000)
    seeds = torch.full_like(positions, 5)
    drawn = reference.uniform(seeds, positions, 8, 0)
    assert kstest(drawn.flatten().numpy(), "uniform").pvalue > 1e-3
    others = {
        "position": drawn.roll(1, 0),
        "token": drawn.roll(1, 1),
        "stream": reference.uniform(seeds, positions, 8, 1),
        "seed": reference.uniform(seeds + 1, positions, 8, 0),
    }
    for name, other in others.items():
        correlation = float(torch.corrcoef(torch.stack((drawn.flatten(), other.flatten())))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(drawn.numel()), name
