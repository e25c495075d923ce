"""Norm, gate, rotation with cache write, and draft input: interpreted kernels against their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdecode_kernels.draft_input import kernel as draft_input
from specdecode_kernels.draft_input import op as draft_input_op
from specdecode_kernels.draft_input import reference as draft_input_reference
from specdecode_kernels.rms_norm import kernel as rms_norm
from specdecode_kernels.rms_norm import reference as rms_norm_reference
from specdecode_kernels.rope_cache import kernel as rope_cache
from specdecode_kernels.rope_cache import reference as rope_cache_reference
from specdecode_kernels.rope_cache.reference import UNSCALED, Scales
from specdecode_kernels.silu_mul import kernel as silu_mul
from specdecode_kernels.silu_mul import reference as silu_mul_reference
from support.kernels.interpreted import Plant, random

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def close(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, atol=TOLERANCE[b.dtype], rtol=TOLERANCE[b.dtype], equal_nan=True)
        for a, b in zip(actual, wanted, strict=True)
    )


def norm_matches(module: ModuleType, rows: int, size: int, residual: bool, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the norm kernel equals the reference, for rows inside a wider tensor."""
    x, r = random(rows, size + 3, dtype=dtype)[:, :size], random(rows, size + 5, dtype=dtype, seed=1)[:, 5:]
    weight = random(size, dtype=dtype, seed=2)
    actual = module.rms_norm(x, weight, 1e-2, r if residual else None)
    return close(actual, rms_norm_reference.rms_norm(x, weight, 1e-2, r if residual else None))


@DTYPES
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (5, 64), (2, 100)])
def test_norm(rows: int, size: int, residual: bool, dtype: torch.dtype) -> None:
    assert norm_matches(rms_norm, rows, size, residual, dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (2, 1100)])
def test_gate(rows: int, size: int, dtype: torch.dtype) -> None:
    x = 3 * random(rows, 2 * size + 1, dtype=dtype)[:, : 2 * size]
    assert close((silu_mul.silu_mul(x),), (silu_mul_reference.silu_mul(x),))


def test_gate_of_large_numbers() -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]])
    assert torch.equal(silu_mul.silu_mul(x)[0, :2].abs(), torch.tensor([0.0, 200.0]))


def rotation_matches(
    module: ModuleType,
    heads: int,
    kv: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    offset: int = 0,
    stored: torch.dtype | None = None,
) -> bool:
    """Return whether queries and cache equal those of the reference.

    Heads lie in one tensor, as a joined matrix writes them. Of the two padding tokens at the end, the row of either may
    remain in slot 0.
    """
    tokens = 6
    qkv = random(tokens, heads + 2 * kv, size, dtype=dtype)
    parts = qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
    angle = 3 * random(40, size // 2, seed=1)
    tables = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    positions = torch.tensor([0, 39, 7, 7, 0, 0])
    slots = torch.tensor([17, 40, 23, 33, 0, 0]) + offset
    caches = [torch.full((2, 4, 16, kv, size), torch.nan, dtype=stored or dtype) for _ in range(2)]
    scales = UNSCALED if stored is None else Scales(0.03, 0.002)
    actual = module.rope_cache(*parts, *tables, positions, slots, caches[0], scales)
    wanted = rope_cache_reference.rope_cache(*parts, *tables, positions, slots, caches[1], scales)
    caches = [cache.float() for cache in caches]
    for cache in caches:
        cache[:, 0, 0] = 0
    return close((actual, caches[0]), (wanted, caches[1]))


@DTYPES
@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (6, 2), (9, 3)])
@pytest.mark.parametrize("size", [2, 64, 96])
def test_rotation_and_cache(heads: int, kv: int, size: int, dtype: torch.dtype) -> None:
    assert rotation_matches(rope_cache, heads, kv, size, dtype)


@DTYPES
def test_cache_in_fp8(dtype: torch.dtype) -> None:
    """Values beyond the largest number become it: those of the last heads are up to 3 / 0.002."""
    assert rotation_matches(rope_cache, 6, 2, 64, dtype, stored=torch.float8_e4m3fn)


def inputs_match(
    module: ModuleType, *, normed: bool, dtype: torch.dtype = torch.float32, sizes: tuple[int, int] = (7, 12)
) -> bool:
    embedding, hidden = random(20, sizes[0], dtype=dtype), random(4, sizes[1], dtype=dtype, seed=1)
    weights = [1 + random(size, dtype=dtype, seed=2) for size in sizes] if normed else [None, None]
    tokens, source = torch.tensor([19, 0, 3, 3, 5]), torch.tensor([0, 0, 3, 1, 2])
    actual = module.draft_input(embedding, tokens, hidden, source, *weights, 1e-2)
    wanted = draft_input_reference.draft_input(
        embedding, tokens, hidden, source, token_weight_A=weights[0], hidden_weight_E=weights[1], eps=1e-2
    )
    return close(actual, wanted)


@DTYPES
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("sizes", [(7, 12), (64, 64), (1, 100)])
def test_draft_input(sizes: tuple[int, int], normed: bool, dtype: torch.dtype) -> None:
    assert inputs_match(draft_input, normed=normed, dtype=dtype, sizes=sizes)


def test_without_sources_each_row_reads_its_own_state() -> None:
    embedding, hidden, tokens = random(20, 7), random(5, 12, seed=1), torch.tensor([19, 0, 3, 3, 5])
    actual = draft_input.draft_input(embedding, tokens, hidden, None, None, None, 0.0)
    wanted = torch.cat((embedding[tokens], hidden), dim=-1), hidden
    assert all(torch.equal(one, two) for one, two in zip(actual, wanted, strict=True))


@pytest.mark.usefixtures("on_kernels")
def test_the_norms_of_a_state_without_gradients_learn() -> None:
    """A head without `fc` reads the target's state, which needs no gradients: the kernel would give its norms none."""
    x, at = random(3, 8), torch.tensor([2, 0])
    weights = [random(8, seed=seed).requires_grad_() for seed in (1, 2)]
    pair, _ = draft_input_op.draft_input(x, at, x, at, token_weight_A=weights[0], hidden_weight_E=weights[1], eps=0.1)
    assert all(gradient.count_nonzero() for gradient in torch.autograd.grad(pair.sum(), weights))


@pytest.mark.usefixtures("on_kernels")
def test_the_op_runs_the_kernel() -> None:
    """The other ops are those of every engine: tests/kernels/test_engine_on_kernels.py counts their launches."""
    x, weight, at = random(3, 8), random(8, seed=1), torch.tensor([2, 0])
    assert close(
        draft_input_op.draft_input(x, at, x, at, hidden_weight_E=weight, eps=0.1),
        draft_input_reference.draft_input(x, at, x, at, hidden_weight_E=weight, eps=0.1),
    )


GATED = random(2, 14)
CHECKS: dict[ModuleType, Callable[[ModuleType], bool]] = {
    rms_norm: lambda module: norm_matches(module, 3, 7, True),
    rope_cache: lambda module: (
        rotation_matches(module, 6, 2, 8) and rotation_matches(module, 6, 2, 64, stored=torch.float8_e4m3fn)
    ),
    silu_mul: lambda module: close((module.silu_mul(GATED),), (silu_mul_reference.silu_mul(GATED),)),
    draft_input: lambda module: inputs_match(module, normed=True),
}
BUGS: dict[str, tuple[ModuleType, str, str]] = {
    "no residual": (rms_norm, "x_E += tl.load(residual_TE", "x_E += 0 * tl.load(residual_TE"),
    "the mean of the padded row": (rms_norm, "/ size + eps", "/ 8 + eps"),
    "eps outside": (rms_norm, "/ size + eps)", "/ size) + eps"),
    "the last column is not read": (rms_norm, "inside = e < size", "inside = e < size - 1"),
    "keys are not rotated": (rope_cache, "_stored(first.to", "_stored(a.to"),
    "turned the other way": (rope_cache, "a * cos - b * sin", "a * cos + b * sin"),
    "neighbours are pairs": (rope_cache, "q_at + D // 2", "q_at + 1"),
    "values go to the keys": (rope_cache, "cache_at = v_NPKD", "cache_at = k_NPKD"),
    "a slot is a position of block 0": (rope_cache, "(slot // PAGE) * block_stride", "0 * block_stride"),
    "the last head of the keys is lost": (rope_cache, "(key_head < kv_heads)", "(key_head < 1)"),
    "the largest fp8 number is not the bound": (rope_cache, "* inverse, -448.0, 448.0", "* inverse, -9999.0, 9999.0"),
    "fp8 without its scale": (rope_cache, "* inverse, -448", "* 1.0, -448"),
    "both halves of the gate are the first": (silu_mul, "+ size + f", "+ f"),
    "the state of the row itself": (draft_input, "source = tl.load(source_T + row)", "source = row % 4"),
    "the halves overlap": (draft_input, "pair + token_size + e", "pair + token_size - 1 + e"),
    "the residual is normed": (draft_input, "plain.to(", "out.to("),
    "a half is not normed": (draft_input, "TOKEN_NORM, BLOCK_A)", "False, BLOCK_A)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_detected(bug: str, plant: Plant) -> None:
    module, old, new = BUGS[bug]
    assert CHECKS[module](module)
    assert not CHECKS[module](plant(module, old, new))
