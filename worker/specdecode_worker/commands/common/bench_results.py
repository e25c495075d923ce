"""Output of ``bench``: text tables, files and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = "  at once   plain tok/s   spec tok/s   ratio   tok/step   plain ms   spec ms   4-grams   identical"


def tables(document: dict[str, Any]) -> Iterator[str]:
    """Yield a heading, a table for each variant, and the fastest variant at each concurrency."""
    yield (
        f"{document['model']}, {document['dtype']}, {document['instruction_set']}, {document['threads']} threads, "
        f"{document['machine']}, {document['date']}"
    )
    variants = document.get("variants") or {document["shape"]: document["concurrency"]}
    for name, by_concurrency in variants.items():
        yield "\n".join((name, HEADER, *(_row(count, row) for count, row in by_concurrency.items())))
    if len(variants) > 1:
        yield "\n".join(_winners(variants))
    if "transformers" in document:
        yield f"transformers, one at a time: {document['transformers']['tokens_per_second']:.1f} tokens/s"


def _row(count: int, row: dict[str, Any]) -> str:
    """Format the results at one concurrency."""
    plain, speculative = row["plain"], row["speculative"]
    return (
        f"  {count:7}   {plain['tokens_per_second']:11.1f}   {speculative['tokens_per_second']:10.1f}   "
        f"{row['ratio']:5.2f}   {row['tokens_per_step']:8.2f}   {plain['step_milliseconds']:8.1f}   "
        f"{speculative['step_milliseconds']:7.1f}   {row['distinct_4grams']:7.2f}   {row['identical_answers']:>9}"
    )


def _winners(variants: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each concurrency with the fastest variant."""
    yield "fastest at each concurrency (ratio to plain)"
    for count in next(iter(variants.values())):
        ratios = {name: rows[count]["ratio"] for name, rows in variants.items()}
        best = max(ratios, key=lambda name: ratios[name])
        name, ratio = (best, ratios[best]) if ratios[best] > 1 else ("plain", 1.0)
        yield f"  {count:7}   {name} ({ratio:.2f})"


def write_files(document: dict[str, Any], stem: Path, text: str) -> None:
    """Write STEM.json, STEM.md and STEM.png. Raise OSError if that fails."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    stem.with_suffix(".md").write_text(f"```\n{text}\n```\n")
    plot(document, stem.with_suffix(".png"))


def plot(document: dict[str, Any], path: Path) -> None:
    """Plot the ratio to plain decoding over concurrency, with a line for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    variants = document.get("variants") or {document["shape"]: document["concurrency"]}
    for name, rows in variants.items():
        counts = [int(count) for count in rows]
        axes.plot(counts, [row["ratio"] for row in rows.values()], marker="o", label=name)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second, over plain decoding")
    axes.set_title(f"{document['machine']}, {document['dtype']}, {document['date']}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
