"""Kernels at production sizes against their reference implementations, which run on the same GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdecode_kernels.draft_input import op as draft_input
from specdecode_kernels.draft_input import reference as draft_input_reference
from specdecode_kernels.grouped_linear import op as grouped_linear
from specdecode_kernels.grouped_linear import reference as grouped_linear_reference
from specdecode_kernels.kv_keep import op as kv_keep
from specdecode_kernels.kv_keep import reference as kv_keep_reference
from specdecode_kernels.noise import op as noise
from specdecode_kernels.noise import reference as noise_reference
from specdecode_kernels.quantised_linear import op as quantised_linear
from specdecode_kernels.quantised_linear import reference as quantised_linear_reference
from specdecode_kernels.rms_norm import op as rms_norm
from specdecode_kernels.rms_norm import reference as rms_norm_reference
from specdecode_kernels.rope_cache import op as rope_cache
from specdecode_kernels.rope_cache import reference as rope_cache_reference
from specdecode_kernels.rope_cache.reference import FP8, UNSCALED, Scales
from specdecode_kernels.sample import op as sample
from specdecode_kernels.sample import reference as sample_reference
from specdecode_kernels.silu_mul import op as silu_mul
from specdecode_kernels.silu_mul import reference as silu_mul_reference
from specdecode_kernels.top_k import op as top_k
from specdecode_kernels.top_k import reference as top_k_reference
from specdecode_kernels.tree_attention.op import Prepared, attend, prepare
from specdecode_kernels.verify import op as verify
from specdecode_kernels.verify import reference as verify_reference

VOCABULARY = 128_256
PAGE = 16
CUDA = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA).to(dtype)


def close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


CHAIN, TREE, CHUNK = [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, *[1 + i % 4 for i in range(59)]], None
MIXTURES: dict[str, list[tuple[int, list[int] | None, int]]] = {
    "a chain at 8k": [(8192, CHAIN, 0)],
    "a chain at 128k": [(131_000, CHAIN, 0)],
    "a token each": [(97 * b + 1, [-1], 0) for b in range(64)],
    "all kinds": [(8192, CHAIN, 0), (0, CHUNK, 512), (333, TREE, 0), (1, [-1], 0), (4096, CHUNK, 300), (64, TREE, 0)],
    "256 short ones": [(b % 77, CHAIN, 0) for b in range(256)],
    "one long beside many short": [(100_000, CHAIN, 0), *[(200, CHAIN, 0)] * 31],
}


def ancestors(parents: list[int] | None, rows: int) -> list[int]:
    if parents is None:
        return [0] * rows
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if node else 0) | 1 << node)
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.bfloat16, FP8)],
    ids=["bf16", "fp16", "fp32", "fp8 cache"],
)
@pytest.mark.parametrize(("heads", "kv", "size"), [(32, 8, 128), (9, 3, 64), (32, 32, 96)])
@pytest.mark.parametrize("name", MIXTURES)
def test_attention(name: str, heads: int, kv: int, size: int, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Attention equals the fp32 reference that reads sequence by sequence; unowned slots hold NaN."""
    sequences = MIXTURES[name]
    counts = [len(parents) if parents else rows for _, parents, rows in sequences]
    bounds = [prefix + count for (prefix, *_), count in zip(sequences, counts, strict=True)]
    needed = [-(-bound // PAGE) for bound in bounds]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)) + 1).split(needed)
    blocks = [part.tolist() for part in order]
    cache = random(2, sum(needed) + 1, PAGE, kv, size, dtype=dtype)
    cache[:, 0] = torch.nan
    for owned, bound in zip(blocks, bounds, strict=True):
        if bound % PAGE:
            cache[:, owned[-1], bound % PAGE :] = torch.nan
    read, scales = cache.float(), UNSCALED
    if stored is not None:
        cache = read = cache.to(stored)
        scales = Scales(0.5, 2.0)
    table = torch.zeros(len(blocks), max(needed), dtype=torch.int64)
    for b, owned in enumerate(blocks):
        table[b, : len(owned)] = torch.tensor(owned)
    q = random(sum(counts), heads, size, dtype=dtype, seed=2)
    masks = [mask for _, parents, rows in sequences for mask in ancestors(parents, rows)]

    def prepared(one_by_one: bool, dtype: torch.dtype) -> Prepared:
        return prepare(
            blocks=blocks,
            block_table_BM=table.to(CUDA),
            block_size=PAGE,
            query_counts=counts,
            key_bounds=bounds,
            prefix_len_B=torch.tensor([prefix for prefix, *_ in sequences], device=CUDA),
            ancestors_T=torch.tensor(masks, device=CUDA),
            key_starts=[0] * len(sequences),
            dense=False,
            groups=heads // kv,
            dtype=dtype,
            one_by_one=one_by_one,
            kv_heads=kv,
        )

    actual = attend(q, cache, prepared(False, dtype), scales)
    wanted = attend(q.float(), read, prepared(True, torch.float32), scales)
    close(actual, wanted, dtype)
    assert torch.equal(actual, attend(q, cache, prepared(False, dtype), scales)), "a second run is the same"


ROWS = 64
TEMPERATURE = torch.tensor([0.7, 1.0, 1.3, 1.0] * (ROWS // 4))
CUTS = (torch.tensor([0, 50, 0, 20] * (ROWS // 4)), torch.tensor([0.95, 1.0, 1.0, 0.9] * (ROWS // 4)))


def rows_of(dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Return (logits, temperature, truncation, seeds, positions)."""
    truncation = sample_reference.Truncation(CUTS[0].to(CUDA), CUTS[1].to(CUDA), torch.full((ROWS,), 1e-4, device=CUDA))
    seeds = torch.arange(ROWS, device=CUDA) * 2**40 + 7
    return 3 * random(ROWS, VOCABULARY, dtype=dtype), TEMPERATURE.to(CUDA), truncation, seeds, seeds % 10_007


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_thresholds_equal_sorting(dtype: torch.dtype) -> None:
    logits, temperature, truncation, *_ = rows_of(dtype)
    actual = sample.processed(logits, temperature, *truncation, truncated=True)
    wanted = sample_reference.processed(logits.double(), temperature, *truncation)
    differing = (torch.isfinite(actual) != torch.isfinite(wanted)).sum(-1)
    assert differing.max() <= 1, "a token on the edge of top-p at most"
    same = torch.isfinite(actual) & torch.isfinite(wanted)
    close(actual[same], wanted[same], torch.float32)


@pytest.mark.parametrize("truncated", [False, True])
def test_choice_equals_plain_decoding(truncated: bool) -> None:
    logits, temperature, truncation, seeds, positions = rows_of(torch.bfloat16)
    cuts = truncation if truncated else None
    actual = verify.choose(logits, temperature, seeds, positions, cuts)
    wanted = verify_reference.chosen_tokens(logits.double(), temperature, seeds, positions, cuts)
    assert (actual != wanted).sum() <= int(truncated), "a token on the edge of top-p at most"
    assert torch.equal(actual[5:6], verify.choose(logits[5:6], *(x[5:6] for x in (temperature, seeds, positions)),
                                                 None if cuts is None else tuple(c[5:6] for c in cuts)))  # fmt: skip


@pytest.mark.parametrize("mapped", [False, True])
def test_proposals(mapped: bool) -> None:
    logits, temperature, _, seeds, positions = rows_of(torch.bfloat16)
    logits = logits[:, :32_000] if mapped else logits
    arguments = {
        "temperature_R": temperature,
        "seed_R": seeds,
        "position_R": positions,
        "vocab_size": VOCABULARY,
        "ids_V": torch.randperm(VOCABULARY, device=CUDA)[:32_000].sort().values if mapped else None,
        "sharpness": 1.5,
    }
    proposals = top_k.top_k(logits, 8, **arguments)
    assert (proposals == top_k_reference.top_k(logits.float(), 8, **arguments)).float().mean() > 0.99


def test_noise() -> None:
    _, _, _, seeds, positions = rows_of(torch.bfloat16)
    actual = noise.gumbel(seeds, positions, VOCABULARY)
    torch.testing.assert_close(actual, noise_reference.gumbel(seeds, positions, VOCABULARY), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("group", [None, 7])
def test_kv_keep_moves_overlapping_rows(group: int | None) -> None:
    """Overlapping rows are moved correctly in many repetitions, since a race would show only sometimes."""
    for seed in range(20):
        actual = random(32, 2, 64, PAGE, 8, 128, seed=seed)
        wanted = actual.clone()
        path = torch.arange(1, 8, device=CUDA) + torch.arange(1, 8, device=CUDA) // 2
        first = torch.arange(1, 31, device=CUDA)[:, None] * 2 * PAGE
        source, target = (first + path).flatten(), (first + torch.arange(1, 8, device=CUDA)).flatten()
        kv_keep.kv_keep(actual, source, target, group=group)
        kv_keep_reference.kv_keep(wanted, source, target)
        assert torch.equal(actual, wanted)


def test_multi_round() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4]] * 8, device=CUDA)
    logp, logq = (torch.log_softmax(random(16, 6, 5000, dtype=torch.float64, seed=s), -1) for s in (1, 2))
    tokens = torch.randint(0, 5000, parents.shape, device=CUDA)
    seeds = torch.arange(16, device=CUDA) + 99
    actual = verify.multi_round(parents, tokens, logp, logq, seeds, seeds, 5)
    wanted = verify.multi_round(*(x.cpu() for x in (parents, tokens, logp, logq, seeds, seeds)), 5)
    for name in ("path_BD", "count_B", "bonus_B"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(wanted, name))


def test_small_kernels() -> None:
    x, weight = random(384, 4096), random(4096, seed=1)
    for actual, wanted in zip(
        rms_norm.rms_norm(x, weight, 1e-5, x), rms_norm_reference.rms_norm(x, weight, 1e-5, x), strict=True
    ):
        close(actual, wanted, torch.bfloat16)
    gate_up = random(384, 2 * 14_336)
    close(silu_mul.silu_mul(gate_up), silu_mul_reference.silu_mul(gate_up), torch.bfloat16)
    at = torch.arange(384, device=CUDA).flip(0)
    norms = {"token_weight_A": weight, "hidden_weight_E": weight, "eps": 1e-5}
    for actual, wanted in zip(
        draft_input.draft_input(x, at, x, at, **norms),
        draft_input_reference.draft_input(x, at, x, at, **norms),
        strict=True,
    ):
        close(actual, wanted, torch.bfloat16)
    heads = random(384, 48, 128).split([32, 8, 8], dim=1)
    angle = random(1000, 64, dtype=torch.float32)
    tables = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    caches = [torch.zeros(2, 30, PAGE, 8, 128, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    turned = [
        rope(*heads, *tables, at, at + PAGE, cache)
        for rope, cache in zip((rope_cache.rope_cache, rope_cache_reference.rope_cache), caches, strict=True)
    ]
    close(*turned, torch.bfloat16)
    close(*caches, torch.bfloat16)
    stored = [torch.zeros_like(caches[0]).to(FP8) for _ in range(2)]
    for rope, cache in zip((rope_cache.rope_cache, rope_cache_reference.rope_cache), stored, strict=True):
        rope(*heads, *tables, at, at + PAGE, cache, Scales(0.25, 2.0))
    same = torch.eq(*(cache.view(torch.uint8) for cache in stored))
    assert same.float().mean() > 0.999, "a number that lies between two may be rounded to the other one"


def test_captured_graph_serves_other_lengths() -> None:
    from specdecode_kernels.tree_attention import kernel
    from specdecode_kernels.tree_attention.plan import plan

    batch, nodes, kv = 4, 6, 8
    cache = random(2, 4 * 128 + 1, PAGE, kv, 128)
    q = random(batch * nodes, 32, 128, seed=1)
    lengths, starts = torch.tensor([5, 2000, 64, 0], device=CUDA), torch.zeros(batch, dtype=torch.int64, device=CUDA)
    table = torch.arange(1, 4 * 128 + 1, device=CUDA).view(batch, 128)
    masks = torch.tensor([(2 << n) - 1 for n in range(nodes)] * batch, device=CUDA)
    query_start = torch.arange(batch + 1, device=CUDA) * nodes

    def run() -> Tensor:
        made = plan(
            query_start=query_start,
            prefix_len_B=lengths,
            key_start_B=starts,
            ancestors_T=masks,
            block_table_BM=table,
            block_size=PAGE,
            groups=4,
            kv_heads=kv,
        )
        return kernel.attend(q, cache, made)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for seed in range(5):
        lengths.copy_(torch.randint(0, 2000, (batch,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(replayed, run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", quantised_linear_reference.KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 14336), (2 * 14336, 4096), (32_000, 4096), (576, 1536)])
def test_quantised_linear(outputs: int, inputs: int, kind: quantised_linear_reference.Kind, dtype: torch.dtype) -> None:
    weight = quantised_linear_reference.quantise(random(outputs, inputs), kind)
    for rows in (1, 2, 6, 17, 64, 100, 600):  # more than 64: fp8 products for bf16, tiles, dequantised matrices
        x = random(rows, inputs, dtype=dtype, seed=rows) / inputs**0.5
        actual = quantised_linear.linear(x, weight)
        close(actual, quantised_linear_reference.linear(x, weight), dtype)
        assert torch.equal(actual, quantised_linear.linear(x, weight)), "a second run is the same"


@pytest.mark.parametrize("kind", [None, "int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 6, 64, 600])
def test_products_of_experts(rows: int, kind: quantised_linear_reference.Kind | None) -> None:
    """An eighth of a layer of Scout: rows are grouped by expert, and multiplied with gate and up, then with down."""
    experts, size, inner = 16, 5120, 1024
    logits = random(rows, experts, dtype=torch.float32, seed=3)
    groups, wanted = grouped_linear.group(logits), grouped_linear_reference.group(logits)
    assert torch.equal(groups.order_T, wanted.order_T)
    assert torch.equal(groups.tiles_M3, wanted.tiles_M3)
    close(groups.score_T, wanted.score_T, torch.float32)
    groups, x = replace(groups, score_T=groups.score_T.bfloat16()), random(rows, size, seed=rows)
    gate_up = random(experts * 2 * inner, size, seed=4) / size**0.5
    down = random(experts * size, inner, seed=5) / inner**0.5
    for matrices, given, more in (
        (gate_up, x, {"scored": True, "gated": True}),
        (down, x[:, :inner], {"residual_TN": x}),
    ):
        held = matrices if kind is None else quantised_linear_reference.quantise(matrices, kind)
        actual = grouped_linear.grouped_linear(given, held, groups, **more)
        close(actual, grouped_linear_reference.grouped_linear(given, held, groups, **more), torch.bfloat16)
        again = grouped_linear.grouped_linear(given, held, groups, **more)
        assert torch.equal(actual, again), "a second run is the same"
