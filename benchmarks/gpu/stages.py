"""What `make gpu` measures, in the order of worth. A stage is a function that yields rows; every row is kept at once.

Each runs in a process of its own (stage.py): what one breaks, the next does not see.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from given import Run

Row = dict[str, Any]


def copy(run: Run) -> Iterator[Row]:
    from timing import copy_rate

    yield {"kind": "copy", "gigabytes_per_second": copy_rate() / 1e9}


def attention(run: Run) -> Iterator[Row]:
    """Largest first; FlexAttention, which compiles for seconds, behind our own."""
    import attention as bench

    layer = bench.Layer(4, 2, 16, torch.float32) if run.dry else bench.Layer()
    sizes = [(2, 40)] if run.dry else [(b, c) for c in (8192, 1024) for b in (64, 1, 8)]
    for batch, context in sizes:
        decoded = bench.measure_flash_decode(bench.case(batch, context, bench.ONE, layer))
        for masks in (bench.CHAIN, bench.ONE):
            row = bench.measure(bench.case(batch, context, masks, layer), run.rate)
            yield {"kind": "attention", **row, "flash_decode_microseconds": decoded}
    for batch, context in sizes[:2]:
        flex = bench.measure_flex(bench.case(batch, context, bench.CHAIN, layer))
        yield {"kind": "flex", "batch": batch, "context": context, "nodes": len(bench.CHAIN), "microseconds": flex}


def sampling(run: Run) -> Iterator[Row]:
    import sampling as bench

    for rows in (1, 2) if run.dry else (1, 48, 64, 384):
        yield {"kind": "sampling", **bench.measure(rows, run.rate, 512 if run.dry else bench.VOCABULARY)}


def quantised(run: Run) -> Iterator[Row]:
    import quantised as bench

    matrices = {"tiny": (40, 96)} if run.dry else bench.MATRICES
    rows, dtype = ((1, 3), torch.float32) if run.dry else (bench.ROWS, torch.bfloat16)
    for name, (outputs, inputs) in matrices.items():
        for row in bench.measure(name, outputs, inputs, run.rate, dtype, rows):
            yield {"kind": "quantised", **row}


def products(run: Run) -> Iterator[Row]:
    """Fused products of few rows against the library's: they say for which shapes the fused one is worth it."""
    import products as bench

    tiny = {"gate and up": (40, 96), "down": (20, 96), "qkv": (20, 96)}
    matrices, rows = (tiny, (1, 3)) if run.dry else (bench.MATRICES, bench.ROWS)
    for row in bench.measure_all(run.rate, torch.float32 if run.dry else torch.bfloat16, matrices, rows):
        yield {"kind": "product", **row}


def engine_8b(run: Run) -> Iterator[Row]:
    from engine_rows import Wanted, rows

    yield from rows(run, "8b", Wanted(shapes=("plain", "chain:3", "chain:5", "tree:4,2,1")), _folder())


def engine_8b_eager(run: Run) -> Iterator[Row]:
    """Nothing where the engine captures no graphs: then engine_8b is this."""
    from engine_rows import Wanted, rows
    from harness import captures_graphs

    if captures_graphs():
        yield from rows(run, "8b", Wanted(shapes=("plain", "chain:3"), batches=(1, 16), eager=True), _folder())


def engine_8b_int4_draft(run: Run) -> Iterator[Row]:
    from engine_rows import Wanted, rows
    from harness import quantises_drafts

    if quantises_drafts():
        wanted = Wanted(shapes=("plain", "chain:3", "chain:5"), batches=(1, 16), draft_quantization="int4")
        yield from rows(run, "8b", wanted, _folder())


def engine_70b(run: Run) -> Iterator[Row]:
    from engine_rows import Wanted, rows

    wanted = Wanted(shapes=("plain", "chain:3", "chain:5"), batches=(64, 1, 16))
    yield from rows(run, "70b", wanted, _folder())


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="specdecode-gpu-"))


@dataclass(frozen=True, slots=True)
class Stage:
    """``budget_seconds`` is what it may take of the whole; less when those before took longer."""

    name: str
    run: Callable[[Run], Iterator[Row]]
    budget_seconds: float
    interpreted: bool = False
    """In a dry run its kernels go through Triton's interpreter."""


TESTS_SECONDS = 120.0
"""For tests/gpu, which run first."""
STAGES = (
    Stage("copy", copy, 20),
    Stage("engine-8b", engine_8b, 150),
    Stage("products", products, 40, interpreted=True),
    Stage("attention", attention, 55, interpreted=True),
    Stage("sampling", sampling, 20),
    Stage("quantised", quantised, 30, interpreted=True),
    Stage("engine-70b-eighth", engine_70b, 65),
    Stage("engine-8b-eager", engine_8b_eager, 30),
    Stage("engine-8b-int4-draft", engine_8b_int4_draft, 30),
)
