"""File of kernel timings, from the rows of the stages: `serve --kernel-timings` reads it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdecode_kernels.timings import Case, Timings

Row = dict[str, Any]


def timings_of(gpu: str, rows: Sequence[Row]) -> Timings:
    """Return the times of every operation that was measured in several ways."""
    return Timings(gpu, tuple(_products(rows)), tuple(_prefill(rows)))


def _products(rows: Sequence[Row]) -> list[Case]:
    """Products with quantised weights. Few rows have one way only."""
    return [
        Case((row["weights"], row["outputs"], row["inputs"]), row["rows"], row["ways"])
        for row in rows
        if row["kind"] == "quantised" and len(row.get("ways", ())) > 1
    ]


def _prefill(rows: Sequence[Row]) -> list[Case]:
    """Attention of prompt chunks."""
    return [
        Case((row["heads"], row["kv_heads"], row["head_dim"]), row["keys"], row["ways"])
        for row in rows
        if row["kind"] == "chunk attention"
    ]
