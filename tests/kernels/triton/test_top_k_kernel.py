"""Proposals of the top-k kernel, interpreted, against those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdecode_kernels.sample.kernel import cuts
from specdecode_kernels.top_k import kernel, op, reference

pytestmark = pytest.mark.usefixtures("poisoned")

TEMPERATURE = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0])
TRUNCATION = (torch.tensor([0, 9, 0, 30, 0]), torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0]), torch.zeros(5))
SEEDS = torch.tensor([3, 2**40 + 1, 2**62, 5, 6])
POSITIONS = torch.tensor([0, 1, 2**33, 77, 78])
TARGET_SIZE = 2000


def logits_of(vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def ids_of(vocab: int) -> Tensor:
    return torch.randperm(TARGET_SIZE, generator=torch.Generator().manual_seed(1))[:vocab].sort().values


def proposed(
    module: ModuleType, logits: Tensor, k: int, ids: Tensor | None, sharpness: float, *, truncated: bool = False
) -> Tensor:
    thresholds = cuts(logits, TEMPERATURE, TRUNCATION, sharpness=sharpness, block=128, room=64) if truncated else None
    best: Tensor = module.top_k(logits, k, TEMPERATURE, SEEDS, POSITIONS, ids, sharpness, thresholds, block=64)
    return best


def wanted(logits: Tensor, k: int, ids: Tensor | None, sharpness: float, *, truncated: bool = False) -> Tensor:
    return reference.top_k(
        logits.float(),
        k,
        temperature_R=TEMPERATURE,
        seed_R=SEEDS,
        position_R=POSITIONS,
        vocab_size=logits.shape[1] if ids is None else TARGET_SIZE,
        ids_V=ids,
        sharpness=sharpness,
        truncation=TRUNCATION if truncated else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (7, 7), (63, 3), (64, 8), (100, 4), (1003, 8)])
def test_proposals_equal_the_reference(vocab: int, k: int, mapped: bool) -> None:
    ids = ids_of(vocab) if mapped else None
    assert torch.equal(proposed(kernel, logits_of(vocab), k, ids, 1.5), wanted(logits_of(vocab), k, ids, 1.5))


def test_half_precision_proposes_the_same_set() -> None:
    """Greedy rows in half precision have ties, which the reference may order differently."""
    logits = logits_of(300, torch.float16)[1:4].repeat(2, 1)[:5]
    actual, expected = proposed(kernel, logits, 4, None, 1.0), wanted(logits, 4, None, 1.0)
    assert torch.equal(actual[1:4], expected[1:4])
    assert torch.equal(logits.gather(1, actual), logits.gather(1, expected))


@pytest.mark.parametrize("mapped", [False, True])
def test_truncated_tokens_are_not_proposed(mapped: bool) -> None:
    ids = ids_of(200) if mapped else None
    actual = proposed(kernel, logits_of(200), 3, ids, 0.8, truncated=True)
    assert torch.equal(actual, wanted(logits_of(200), 3, ids, 0.8, truncated=True))
    assert not torch.equal(actual, wanted(logits_of(200), 3, ids, 0.8))


def test_proposals_are_distinct_with_few_candidates() -> None:
    logits = torch.full((5, 130), -torch.inf)
    logits[:, 77] = 0.0
    proposals = proposed(kernel, logits, 8, None, 1.0)
    assert (proposals[:, 0] == 77).all()
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 130 for row in proposals.tolist())


@pytest.mark.usefixtures("on_kernels")
def test_the_op_runs_the_kernel() -> None:
    proposals = op.top_k(
        logits_of(100),
        4,
        temperature_R=TEMPERATURE,
        seed_R=SEEDS,
        position_R=POSITIONS,
        vocab_size=TARGET_SIZE,
        ids_V=ids_of(100),
        truncation=TRUNCATION,
    )
    assert torch.equal(proposals, wanted(logits_of(100), 4, ids_of(100), 1.0, truncated=True))


BUGS: dict[str, tuple[str, str]] = {
    "the draft's own ids draw the noise": (
        "words(seed, position, 0, ids // 4)",
        "words(seed, position, 0, token // 4)",
    ),
    "the wrong word of a counter": ("(ids % 4)[:, None]", "((ids + 1) % 4)[:, None]"),
    "a token is proposed twice": ("free = tl.where(index == first, 0, free)", "free = free"),
    "ids are not mapped": ("tl.load(ids_V + tl.load(at))", "tl.load(at)"),
    "what is cut is proposed": ("if CUT:", "if False:"),
    "one slice alone": ("mask=c < entries, other=-1)", "mask=c < K, other=-1)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Callable[[ModuleType, str, str], ModuleType]) -> None:
    proposals = proposed(plant(kernel, *BUGS[bug]), logits_of(200), 4, ids_of(200), 1.0, truncated=True)
    assert not torch.equal(proposals, wanted(logits_of(200), 4, ids_of(200), 1.0, truncated=True))
