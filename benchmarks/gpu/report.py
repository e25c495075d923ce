"""`make gpu-report`: what `hack/gpu` measured, as a table of targets and steps beside each JSON, and a plot.

python benchmarks/gpu/report.py [FILE.json ...]     without files: benchmarks/results/gpu-*.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from page import page

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
        text = page(document)
        path.with_suffix(".md").write_text(text)
        plot(document, path.with_suffix(".png"))
        print(text)
    return 0


def plot(document: dict[str, Any], path: Path) -> None:
    """Step over roofline by batch, and the speed-up of a chain of 3; a line for each shape and context."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, kind, value in ((left, "step", "over_roofline"), (right, "speedup", "speedup")):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in document["rows"]:
            if row["kind"] == kind and value in row:
                name = f"{row['model']}, {row['shape']}, {row['context']} tokens"
                lines.setdefault(name, []).append((row["batch"], row[value]))
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("batch size")
        if lines:
            axis.set_ylim(0, 1.1 * max(value for points in lines.values() for _, value in points))
            axis.legend(fontsize=7, loc="lower right")
    left.set_ylabel("step time / time to read its bytes")
    right.set_ylabel("speed-up over plain (acceptance set to 2.78)")
    title = "dry run" if document["dry_run"] else document["machine"]["gpu"]
    figure.suptitle(f"{title}, {document['machine']['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
