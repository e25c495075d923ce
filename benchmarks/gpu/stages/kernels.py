"""Kernels alone: the copy rate, attention, sampling, and products of bf16 and quantised matrices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from card import clocks

from stages import Run

Row = dict[str, Any]


def copy(run: Run) -> Iterator[Row]:
    from timing import copy_rate, read_rate

    yield {
        "kind": "copy",
        "gigabytes_per_second": copy_rate() / 1e9,
        "read_gigabytes_per_second": read_rate() / 1e9,
        "clocks": clocks(),
    }


def attention(run: Run) -> Iterator[Row]:
    """Trees over long contexts first."""
    import attention as bench

    layer = bench.Layer(2, 1, 16, torch.float32) if run.dry else bench.Layer()
    sizes = [(1, 20)] if run.dry else [(b, c) for c in (8192, 1024) for b in (1, 64, 8)]
    for batch, context in sizes:
        decoded = bench.measure_flash_decode(bench.case(batch, context, bench.ONE, layer))
        prefix = None
        for masks in (bench.ONE, *bench.TREES.values()):
            row = bench.measure(bench.case(batch, context, masks, layer), run.rate)
            prefix = prefix or row["microseconds"]
            row |= {"over_prefix_pass": row["microseconds"] / prefix, "flash_decode_microseconds": decoded}
            yield {"kind": "attention", **row}


def prefill(run: Run) -> Iterator[Row]:
    """Chunks of prompts in every way. The engine takes the fastest from the file of timings."""
    import attention
    import prefill as bench

    layers = (attention.Layer(2, 1, 16, torch.float32),) if run.dry else bench.LAYERS
    for layer, (queries, keys) in product(layers, ((8, 20),) if run.dry else bench.SIZES):
        yield {"kind": "chunk attention", **bench.measure(layer, queries, keys)}


def sampling(run: Run) -> Iterator[Row]:
    import sampling as bench

    for rows in (1, 2) if run.dry else (1, 48, 64, 384):
        yield {"kind": "sampling", **bench.measure(rows, run.rate, 512 if run.dry else bench.VOCABULARY)}


def quantised(run: Run) -> Iterator[Row]:
    import quantised as bench

    matrices = {"tiny": (48, 96)} if run.dry else bench.MATRICES
    cases = [(torch.float32, (1, 3)), (torch.bfloat16, (65,))] if run.dry else [(torch.bfloat16, bench.ROWS)]
    for (name, (outputs, inputs)), (dtype, rows) in product(matrices.items(), cases):
        for row in bench.measure(name, outputs, inputs, run.rate, dtype, rows):
            yield {"kind": "quantised", **row}


def products(run: Run) -> Iterator[Row]:
    """Fused products of few rows against the library's, and other tiles: which sizes and tiles are worth it."""
    import products as bench

    tiny = {"gate and up": (40, 96), "down": (20, 96), "qkv": (20, 96)}
    if run.dry:
        yield from bench.measure_all(run.rate, torch.float32, tiny, (1, 3), (1,), bench.TILES[:2])
        return
    yield from bench.measure_all(run.rate, torch.bfloat16, bench.MATRICES, bench.ROWS, bench.SWEPT_ROWS, bench.TILES)
