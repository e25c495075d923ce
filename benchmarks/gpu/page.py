"""Markdown page of a GPU run: the machine, figures with goals and published values, steps and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

KERNELS = 12
"""Kernels of a step that the page lists; the JSON has more."""


def page(document: dict[str, Any]) -> str:
    """The whole page of a document."""
    rows = document["rows"]
    parts = [_head(document), _stages(document["stages"]), _targets(document["targets"]), _steps(rows), _kernels(rows)]
    return "\n\n".join(text for part in parts if (text := "\n".join(part))) + "\n"


def _head(document: dict[str, Any]) -> Iterator[str]:
    machine = document["machine"]
    if document["dry_run"]:
        yield "**Dry run: no figure below means anything.**\n"
    yield (
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, triton {machine['triton']}, commit "
        f"{machine['commit'][:12]}, {machine['date']}. Rows marked * are synthetic: the acceptance was set."
    )
    for row in document["rows"]:
        if row["kind"] == "copy":
            copied, read = row["gigabytes_per_second"], row["read_gigabytes_per_second"]
            yield f"\nA copy moves {copied:.0f} GB/s, read and written. A sum reads {read:.0f} GB/s: the floors' rate."


def _stages(stages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the stages that were not done, and the result of the GPU tests."""
    for stage in stages:
        if stage["name"] == "tests" and "passed" in stage:
            failed = stage["failed"] + stage["error"]
            yield f"- GPU tests: {stage['passed']} passed, {failed} failed ({stage['status']})"
        elif stage["status"] != "done":
            yield f"- Stage {stage['name']}: {stage['status']}"


def _targets(targets: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| figure | case | measured | goal | met | published |"
    yield "|---|---|---|---|---|---|"
    for found in targets:
        star = " *" if found["synthetic"] else ""
        goal = "-" if found["bound"] is None else f"{'≥' if found['at_least'] else '≤'} {found['bound']:g}"
        measured = "not measured" if found["measured"] is None else f"{found['measured']:.3g}"
        met = {True: "yes", False: "**no**", None: "-"}[found["met"]]
        yield f"| {found['target']}{star} | {found['case']} | {measured} | {goal} | {met} | {found['anchor'] or '-'} |"


def _steps(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = [row for row in rows if row["kind"] in ("step", "speedup")]
    if not found:
        return
    yield "| model | context | graphs | draft | batch | shape | step ms | over roofline | times plain |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in found:
        over = f"{row['over_roofline']:.2f}" if "over_roofline" in row else "-"
        speedup = f"{row['speedup']:.2f}" if "speedup" in row else "-"
        star = " *" if row["synthetic"] else ""
        graphs, draft = "yes" if row["graphs"] else "no", row["draft_quantization"] or "bf16"
        took = f"{row['step_milliseconds']:.2f}"
        cells = [row["model"], row["context"], graphs, draft, row["batch"], row["shape"] + star, took, over, speedup]
        yield f"| {' | '.join(map(str, cells))} |"


def _kernels(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The longest kernels of every profiled step."""
    for whole in rows:
        if whole["kind"] != "kernels":
            continue
        yield (
            f"\nKernels of {whole['shape']}, batch {whole['batch']}, {whole['context']} tokens: "
            f"{whole['launches']:.0f} launches, {whole['busy_microseconds']:.0f} us a step\n"
        )
        yield "| kernel | us a step | launches a step | share |"
        yield "|---|---|---|---|"
        mine = [row for row in rows if row["kind"] == "kernel" and _same(row, whole)]
        for row in mine[:KERNELS]:
            name = row["name"].replace("|", "/")
            yield f"| `{name}` | {row['microseconds']:.1f} | {row['launches']:.1f} | {100 * row['share']:.1f} % |"


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("batch", "shape", "context"))
