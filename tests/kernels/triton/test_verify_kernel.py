"""Verification kernels, interpreted: the choice after every node, and multi-round sampling.

All are exact: tokens, paths and counts equal those of the reference, with the noise of plain decoding.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdecode_kernels.sample.kernel import cuts
from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.verify import kernel, op, reference, rounds
from specdecode_kernels.verify.reference import Accepted
from support.kernels.interpreted import Plant, random

TEMPERATURE = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 1.0, 0.2])
TRUNCATION = Truncation(
    torch.tensor([0, 5, 0, 3, 0, 9, 0]),
    torch.tensor([1.0, 1.0, 0.8, 0.9, 1.0, 1.0, 1.0]),
    torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0]),
)
SEEDS = torch.tensor([3, 2**40 + 1, 2**62, 5, 6, 7, 8])
POSITIONS = torch.tensor([0, 1, 2**33, 77, 78, 9, 10])
ROWS = len(SEEDS)


def logits_of(vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * random(ROWS, vocab, seed=seed)).to(dtype)


def chosen(module: ModuleType, logits: Tensor, truncation: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
    thresholds = None if truncation is None else cuts(logits, TEMPERATURE, truncation, size=128, block=128, room=64)
    tokens: Tensor = module.choose(logits, TEMPERATURE, SEEDS, POSITIONS, thresholds, block=64)
    return tokens


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("vocab", [1, 7, 63, 64, 100, 1003])
def test_chosen_token_equals_plain_decoding(vocab: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        logits = logits_of(vocab, dtype, seed)
        wanted = reference.chosen_tokens(logits, TEMPERATURE, SEEDS, POSITIONS)
        assert torch.equal(chosen(kernel, logits), wanted)


@pytest.mark.parametrize("processors", [1, 4, 1000])
def test_vocabulary_split_does_not_change_the_choice(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "processors", lambda _: processors)
    logits = logits_of(700)
    assert torch.equal(chosen(kernel, logits), reference.chosen_tokens(logits, TEMPERATURE, SEEDS, POSITIONS))


@pytest.mark.slow
def test_truncated_tokens_are_not_chosen() -> None:
    logits = logits_of(200)
    wanted = reference.chosen_tokens(logits, TEMPERATURE, SEEDS, POSITIONS, TRUNCATION)
    assert torch.equal(chosen(kernel, logits, TRUNCATION), wanted)
    assert not torch.equal(chosen(kernel, logits), wanted)


def test_ties_choose_the_first_token_and_empty_rows_token_zero() -> None:
    logits = torch.full((ROWS, 150), -torch.inf)
    logits[0, [70, 140]] = 2.0
    logits[1, 149] = -3.0
    assert chosen(kernel, logits).tolist() == [70, 149, 0, 0, 0, 0, 0]


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    forest = []
    for _ in range(draw(st.integers(1, 4))):
        parents = [-1]
        for node in range(1, draw(st.integers(1, 9))):
            parents.append(draw(st.integers(parents[-1] if node > 1 else 0, node - 1)))
        forest.append(tuple(parents))
    return tuple(forest)


def padded(forest: tuple[tuple[int, ...], ...]) -> Tensor:
    most = max(map(len, forest))
    return torch.tensor([[*parents, *[-1] * (most - len(parents))] for parents in forest])


def same(actual: Accepted, wanted: Accepted) -> bool:
    fields = ("path_BD", "count_B", "bonus_B")
    return all(torch.equal(getattr(actual, name), getattr(wanted, name)) for name in fields)


FOREST = ((-1, 0, 0, 1, 1, 2, 3), (-1, 0, 1, 2, 3), (-1,), (-1, 0, 0, 0))


def rounds_of(
    module: ModuleType, forest: tuple[tuple[int, ...], ...], seed: int, how: str, dtype: torch.dtype = torch.float64
) -> tuple[Accepted, Accepted]:
    """Return (found, wanted) of trees with children drawn from q at all nodes, at no node, or at some nodes."""
    generator = torch.Generator().manual_seed(seed)
    parents = padded(forest)
    batch, nodes = parents.shape
    logits_p, logits_q = torch.randn(2, batch, nodes, 11, generator=generator, dtype=dtype).unbind(0)
    logp, logq = torch.log_softmax(2 * logits_p, -1), torch.log_softmax(2 * logits_p + 2 * logits_q, -1)
    tokens = logq[:, 0].argsort(descending=True)[:, (torch.arange(nodes) - 1) % 11]  # likely tokens are tried first
    seeds = torch.randint(0, 2**62, (batch,), generator=generator)
    positions = torch.randint(0, 5000, (batch,), generator=generator)
    drawn = {"best": None, "drawn": torch.ones(batch, nodes, dtype=torch.bool)}.get(how)
    if how == "some":
        drawn = torch.rand(batch, nodes, generator=generator) < 0.5
    depth = nodes - 1
    q = None if how == "best" else logq
    actual = module.multi_round(parents, tokens, logp, q, seeds, positions, depth, drawn, max(nodes - 1, 1), block=16)
    return actual, op.multi_round(parents, tokens, logp, q, seeds, positions, depth, drawn_BN=drawn)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("how", ["best", "drawn", "some"])
@settings(max_examples=8, deadline=None)
@given(forest=trees(), seed=st.integers(0, 999))
def test_rounds(how: str, forest: tuple[tuple[int, ...], ...], seed: int) -> None:
    assert same(*rounds_of(rounds, forest, seed, how))


@pytest.mark.parametrize("how", ["best", "drawn"])
def test_rounds_in_single_precision(how: str) -> None:
    for seed in range(4):
        assert same(*rounds_of(rounds, FOREST, seed, how, torch.float32))


@pytest.mark.usefixtures("on_kernels")
def test_the_op_runs_the_rounds() -> None:
    parents = padded(FOREST)
    tokens = torch.randint(0, 2, parents.shape)
    logp = torch.log_softmax(torch.randn(4, 7, 11), -1)
    accepted = op.multi_round(parents, tokens, logp, logp, SEEDS[:4], POSITIONS[:4], 4)
    one = reference.multi_round(parents[0], tokens[0], logp[0], logp[0], int(SEEDS[0]), int(POSITIONS[0]))
    assert ([n for n in accepted.path_BD[0].tolist() if n >= 0], int(accepted.bonus_B[0])) == one


CHOICE_BUGS: dict[str, tuple[str, str]] = {
    "what is cut is chosen": ("if CUT:", "if False:"),
    "greedy rows are sampled": ("if temperature > 0:", "if temperature > -1:"),
    "no noise": ("x.to(tl.float64) + exact_gumbel(bits)", "x.to(tl.float64)"),
    "noise of the first block for all": (
        "start // 4 + tl.arange(0, BLOCK // 4)), token",
        "tl.arange(0, BLOCK // 4)), token",
    ),
    "later blocks count for nothing": ("if reach.to(tl.float64) >= best", "if reach.to(tl.float64) >= best + 100"),
    "a better block does not replace": ("at = tl.where(top > best, first, at)", "at = tl.minimum(first, at)"),
    "shares are joined by the lowest token": ("tl.where(best_S == tl.max(best_S, 0), at_S, 2147483647)", "at_S"),
}
ROUND_BUGS: dict[str, tuple[str, str]] = {
    "the coin of another node": ("tl.where(n == child, coin_N, 0.0)", "tl.where(n == 0, coin_N, 0.0)"),
    "the chance is p": ("p_x / tl.where(q_x > 0, q_x, 1.0)", "p_x"),
    "a residual is not normalised": ("left / total, p)", "left, p)"),
    "q keeps what was refused": ("tl.where(token == x, 0.0, q)", "q + 0.0 * token"),
    "p keeps what was refused": ("tl.where(token == x, 0.0, p))", "p)"),
    "the position stands still": ("here = position + 1 + level", "here = position + 1"),
    "the token is drawn from the whole of p": ("start + v < vocab_size, made)", "start + v < vocab_size, 0 * made)"),
    "the draw has the coins' stream": ("seed, here, RESIDUAL", "seed, here, COINS"),
}  # fmt: skip


@pytest.mark.parametrize("bug", CHOICE_BUGS)
def test_bugs_planted_in_the_choice_are_detected(bug: str, plant: Plant) -> None:
    mutant = plant(kernel, *CHOICE_BUGS[bug])
    mutant.processors = lambda _: 3  # splits of more than one block
    seen = []
    for seed in range(3):
        logits = logits_of(300, seed=seed)
        wanted = reference.chosen_tokens(logits, TEMPERATURE, SEEDS, POSITIONS, TRUNCATION)
        seen.append(not torch.equal(chosen(mutant, logits, TRUNCATION), wanted))
    assert any(seen)


@pytest.mark.parametrize("bug", ROUND_BUGS)
def test_bugs_planted_in_the_rounds_are_detected(bug: str, plant: Plant) -> None:
    mutant = plant(rounds, *ROUND_BUGS[bug])
    forest = (*FOREST, *[(-1, 0, 0, 0, 0, 0, 0)] * 8)
    assert not all(same(*rounds_of(mutant, forest, seed, how)) for seed in range(4) for how in ("drawn", "best"))
