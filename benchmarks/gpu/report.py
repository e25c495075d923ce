"""`make gpu-report`: what `hack/gpu` measured, as a table of targets and steps beside each JSON, and a plot.

python benchmarks/gpu/report.py [FILE.json ...]     without files: benchmarks/results/gpu-*.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

_RESULTS = Path(__file__).parents[1] / "results"
_NOTHING = "benchmarks/results holds no gpu-*.json yet: run `make gpu` on a machine with a GPU and put its JSON there."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    files = parser.parse_args().files or sorted(_RESULTS.glob("gpu-*.json"))
    if not files:
        print(_NOTHING)
        return 0
    for path in files:
        document = json.loads(path.read_text())
        if document["dry_run"] and path.parent.resolve() == _RESULTS:
            raise SystemExit(f"error: {path} is of a dry run, and its figures mean nothing; remove it")
        text = table(document)
        path.with_suffix(".md").write_text(text)
        plot(document, path.with_suffix(".png"))
        print(text)
    return 0


def table(document: dict[str, Any]) -> str:
    """Markdown: the machine, every target with what was measured, the steps, and what did not get done."""
    return "\n".join([*_head(document), "", *_targets(document), "", *_steps(document["rows"]), ""])


def _head(document: dict[str, Any]) -> Iterator[str]:
    machine = document["machine"]
    if document["dry_run"]:
        yield "**Dry run: no figure below means anything.**\n"
    yield (
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, triton {machine['triton']}, commit "
        f"{machine['commit'][:12]}, {machine['date']}. Rows marked * are synthetic: the acceptance was set."
    )
    for stage in document["stages"]:
        if stage["name"] == "tests" and "passed" in stage:
            failed = stage["failed"] + stage["error"]
            yield f"\nGPU tests: {stage['passed']} passed, {failed} failed ({stage['status']})."
        elif stage["status"] != "done":
            yield f"\nStage {stage['name']}: {stage['status']}."
    for row in document["rows"]:
        if row["kind"] == "copy":
            yield f"\nA copy moves {row['gigabytes_per_second']:.0f} GB/s, read and written."


def _targets(document: dict[str, Any]) -> Iterator[str]:
    yield "| target | case | asked | measured | met |"
    yield "|---|---|---|---|---|"
    for found in document["targets"]:
        star = " *" if found["synthetic"] else ""
        asked = f"{'≥' if found['at_least'] else '≤'} {found['bound']:g}"
        measured = "-" if found["measured"] is None else f"{found['measured']:.3g}"
        met = {True: "yes", False: "no", None: "not measured"}[found["met"]]
        yield f"| {found['target']}{star} | {found['case']} | {asked} | {measured} | {met} |"


def _steps(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| model | graphs | draft | batch | shape | step ms | over roofline | times plain |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row["kind"] not in ("step", "speedup"):
            continue
        over = f"{row['over_roofline']:.2f}" if "over_roofline" in row else "-"
        speedup = f"{row['speedup']:.2f}" if "speedup" in row else "-"
        star = " *" if row["synthetic"] else ""
        cells = [row["model"], "yes" if row["graphs"] else "no", row["draft_quantization"] or "bf16", row["batch"]]
        cells += [row["shape"] + star, f"{row['step_milliseconds']:.2f}", over, speedup]
        yield f"| {' | '.join(map(str, cells))} |"


def plot(document: dict[str, Any], path: Path) -> None:
    """Step over roofline by batch, and the speed-up of a chain of 3; a line for each stage and shape."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, kind, value in ((left, "step", "over_roofline"), (right, "speedup", "speedup")):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in document["rows"]:
            if row["kind"] == kind and value in row:
                lines.setdefault(f"{row['stage']} {row['shape']}", []).append((row["batch"], row[value]))
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("texts at once")
        if lines:
            axis.legend(fontsize=7)
    left.set_ylabel("step over the bytes that it must read")
    right.set_ylabel("times plain (synthetic acceptance)")
    title = "dry run" if document["dry_run"] else document["machine"]["gpu"]
    figure.suptitle(f"{title}, {document['machine']['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
