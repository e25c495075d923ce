"""Proposals of the top-k kernel, interpreted, against those of the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.top_k import kernel, op, reference
from support.kernels.interpreted import Plant, random

pytestmark = pytest.mark.usefixtures("poisoned")

TEMPERATURE = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0])
TRUNCATION = Truncation(
    torch.tensor([1, 2, 0, 30, 1]),
    torch.tensor([1.0, 1.0, 0.03, 0.9, 0.1]),
    torch.tensor([0.0, 0.0, 0.0, 0.4, 0.9]),
)
SEEDS = torch.tensor([3, 2**40 + 1, 2**62, 5, 6])
POSITIONS = torch.tensor([0, 1, 2**33, 77, 78])
TARGET_SIZE = 2000


def logits_of(vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * random(5, vocab, seed=seed)).to(dtype)


def ids_of(vocab: int) -> Tensor:
    return torch.randperm(TARGET_SIZE, generator=torch.Generator().manual_seed(1))[:vocab].sort().values


def proposed(
    module: ModuleType, logits: Tensor, k: int, ids: Tensor | None, sharpness: float, *, truncated: bool = False
) -> Tensor:
    cuts = TRUNCATION if truncated else None
    best: Tensor = module.top_k(logits, k, TEMPERATURE, SEEDS, POSITIONS, ids, sharpness, cuts, block=64)
    return best


def wanted(logits: Tensor, k: int, ids: Tensor | None, sharpness: float, *, truncated: bool = False) -> Tensor:
    """Return the proposals of the reference without truncation; those that the cuts drop among them come last."""
    best = reference.top_k(
        logits.float(),
        k,
        temperature_R=TEMPERATURE,
        seed_R=SEEDS,
        position_R=POSITIONS,
        vocab_size=logits.shape[1] if ids is None else TARGET_SIZE,
        ids_V=ids,
        sharpness=sharpness,
    )
    if not truncated:
        return best
    own = best if ids is None else torch.searchsorted(ids, best)
    shares = torch.softmax(logits.double() * sharpness / torch.where(TEMPERATURE > 0, TEMPERATURE, 1.0)[:, None], -1)
    rows = zip(shares.gather(1, own).tolist(), *(column.tolist() for column in TRUNCATION), strict=True)
    for row, (share, top_k, top_p, min_p) in enumerate(rows):
        better = [[other for other in share if other > mine] for mine in share]
        passes = [
            sum(others) < top_p and (top_k == 0 or len(others) < top_k) and mine >= min_p * max(share)
            for mine, others in zip(share, better, strict=True)
        ]
        best[row] = best[row, sorted(range(k), key=lambda place, passes=passes: not passes[place])]
    return best


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
@pytest.mark.parametrize("k", [3, 8])
def test_truncated_tokens_are_proposed_last(k: int, mapped: bool) -> None:
    ids = ids_of(200) if mapped else None
    actual, free = proposed(kernel, logits_of(200), k, ids, 0.8, truncated=True), wanted(logits_of(200), k, ids, 0.8)
    assert torch.equal(actual, wanted(logits_of(200), k, ids, 0.8, truncated=True))
    assert torch.equal(actual.sort().values, free.sort().values)
    moved = [not torch.equal(*pair) for pair in zip(actual, free, strict=True)]
    assert k == 3 or moved == [False, True, True, True, False]


def test_top_one_is_proposed_first() -> None:
    """With top-k 1 the target always chooses its best token, which is listed unless noise hides it."""
    logits = logits_of(200)
    logits[:, 150] = 12.0
    cuts = Truncation(torch.ones(5, dtype=torch.int64), torch.ones(5), torch.zeros(5))
    proposals = kernel.top_k(logits, 8, TEMPERATURE, SEEDS, POSITIONS, None, 1.0, cuts)
    assert (proposals[:, 0] == 150).all()


def test_proposals_are_distinct_with_few_candidates() -> None:
    logits = torch.full((5, 130), -torch.inf)
    logits[:, 77] = 0.0
    proposals = proposed(kernel, logits, 8, None, 1.0)
    assert (proposals[:, 0] == 77).all()
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 130 for row in proposals.tolist())


@pytest.mark.parametrize("mapped", [False, True])
def test_logits_that_are_no_numbers_give_no_proposals(mapped: bool) -> None:
    """A head can overflow in fp16. What lies before the ids of its vocabulary is no id."""
    logits, ids = logits_of(7), torch.arange(100, 108)[1:] if mapped else None
    logits[:2] = torch.nan
    actual = proposed(kernel, logits, 3, ids, 1.0)
    assert (actual[:2] == -1).all()
    assert torch.equal(actual[2:], wanted(logits, 3, ids, 1.0)[2:])


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
    "ids are not mapped": ("tl.load(ids_V + best_K, mask=listed_K, other=-1)", "best_K + 0"),
    "what is cut is proposed": ("if CUT:", "if False:"),
    "shares are of the listed": ("tl.exp(x_K - lse)", "tl.exp(x_K - tl.max(x_K, 0))"),
    "a slice's mass is that of its best": ("tl.log(tl.sum(tl.exp(x - tl.maximum(top, -1e30)), 0))", "0.0"),
    "top-k keeps one more": ("1) < tl.where(top_k", "1) <= tl.where(top_k"),
    "min-p is forgotten": ("tl.max(x_K, 0) + tl.log(min_p)", "float('-inf')"),
    "the dropped lose their order": (
        "+ tl.cumsum(1 - passing_K, 0)",
        "+ 1 + tl.sum(1 - passing_K, 0) - tl.cumsum(1 - passing_K, 0)",
    ),
    "one slice alone": ("mask=c < entries, other=-1)", "mask=c < K, other=-1)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    mutant, seen = plant(kernel, *BUGS[bug]), []
    for seed in range(4):
        logits, ids = logits_of(200, seed=seed), ids_of(200)
        actual = proposed(mutant, logits, 8, ids, 1.0, truncated=True)
        seen.append(not torch.equal(actual, wanted(logits, 8, ids, 1.0, truncated=True)))
    assert any(seen)
