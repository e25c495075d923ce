"""Program of `hack/gpu`: run each stage within its time, and write a JSON and a page after each.

A run that is ended early leaves a valid document, which names the stages that are missing. The same command goes on: it
keeps the stages that are done and runs the others, unless the code or the machine is another one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from card import described
from gpu_tests import run_tests
from page import page
from stages import PARTS, SECONDS, STAGES, TESTS, TESTS_PROCESSES, Stage
from targets import judge
from timings_file import timings_of

from specdecode_kernels.timings import written

HERE = Path(__file__).parent
FORMAT = 1
LEAST_SECONDS = 5
"""A stage with less time than this is not started."""
DRY_PATIENCE = 5
"""Factor of all times of a dry run, for slow processors; it measures nothing."""


@dataclass(slots=True)
class Document:
    """Results of a run, written to every one of ``folders``. A repeated run goes on from those in the first folder."""

    folders: tuple[Path, ...]
    stem: str
    machine: dict[str, Any]
    dry_run: bool
    stages: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def resume(self) -> None:
        """Take over what an earlier run of the same code on this machine has measured."""
        path = self.folders[0] / f"{self.stem}.json"
        earlier = json.loads(path.read_text()) if path.exists() else {}
        if earlier.get("machine") == self.machine:
            self.stages, self.rows = earlier["stages"], earlier["rows"]

    def status(self, stage: str) -> str | None:
        """Return how a stage ended, None if it has not run."""
        return next((entry["status"] for entry in self.stages if entry["name"] == stage), None)

    def record(self, entry: dict[str, Any], rows: Sequence[dict[str, Any]] = ()) -> None:
        """Add the entry and the rows of a stage, in place of those of an earlier run."""
        self.stages = [one for one in self.stages if one["name"] != entry["name"]] + [entry]
        self.rows = [row for row in self.rows if row["stage"] != entry["name"]] + [*rows]

    def write(self) -> None:
        """In one move, so that a reader never sees half of it."""
        body = {
            "format": FORMAT,
            "dry_run": self.dry_run,
            "machine": self.machine,
            "stages": self.stages,
            "targets": [asdict(verdict) for verdict in judge(self.rows)],
            "rows": self.rows,
        }
        texts = {
            f"{self.stem}.json": json.dumps(body, indent=1) + "\n",
            f"{self.stem}.md": page(body),
            f"kernel-timings-{self.stem}.json": written(timings_of(self.machine["gpu"], self.rows)) + "\n",
        }
        for folder, (name, text) in product(self.folders, texts.items()):
            part = folder / f"{name}.part"
            part.write_text(text)
            part.replace(folder / name)

    @property
    def rate(self) -> float:
        """Bytes read a second, the reference of all floors; 0 while unknown."""
        return next((1e9 * float(row["read_gigabytes_per_second"]) for row in self.rows if row["kind"] == "copy"), 0.0)


def main() -> int:
    args = _arguments()
    returned = os.environ.get("OUT")
    folders = (args.out, Path(returned)) if returned else (args.out,)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    if args.dry_run:
        import stand_in

        stand_in.install()
    machine = described(args.dry_run)
    stem = "dry-run" if args.dry_run else f"gpu-{machine['short_name']}-{machine['date']}"
    stem += f"-part-{args.part}" if args.part else ""
    document = Document(folders, stem, machine, args.dry_run)
    document.resume()
    document.write()
    patience = DRY_PATIENCE if args.dry_run else 1
    until = time.monotonic() + patience * args.seconds
    for stage in PARTS[args.part - 1] if args.part else STAGES:
        if not _wanted(stage.name, args) or (stage.name not in args.stage and document.status(stage.name) == "done"):
            continue
        seconds = min(patience * stage.budget_seconds, until - time.monotonic())
        if seconds < LEAST_SECONDS:
            if document.status(stage.name) is None:
                document.record({"name": stage.name, "status": "no time was left", "seconds": 0.0})
        elif stage.name == TESTS:
            log, processes = folders[-1] / f"{stem}-tests.log", 1 if args.dry_run else TESTS_PROCESSES
            document.record(run_tests(log, seconds, processes=processes, dry=args.dry_run))
        else:
            _run(stage, document, seconds)
        document.write()
    print(folders[-1] / f"{stem}.json")
    print(folders[-1] / f"{stem}.md")
    print(folders[-1] / f"kernel-timings-{stem}.json")
    return 0 if all(stage["status"] == "done" for stage in document.stages) else 1


def _wanted(name: str, args: argparse.Namespace) -> bool:
    """Return True if a stage runs. The copy rate, the reference of all figures, is measured for every choice."""
    return name not in args.skip and (not args.stage or name in args.stage or name == "copy")


def _run(stage: Stage, document: Document, seconds: float) -> None:
    began = time.monotonic()
    part = document.folders[-1] / f"{document.stem}.{stage.name}.jsonl"
    part.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "stage.py"), stage.name, str(part), str(document.rate)]
    if document.dry_run:
        command.append("--dry-run")
    environment = dict(os.environ, TRITON_INTERPRET="1" if document.dry_run and stage.interpreted else "0")
    print(f"==> {stage.name}, {seconds:.0f} s at most", file=sys.stderr, flush=True)
    error = ""
    try:
        ran = subprocess.run(
            command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace", timeout=seconds
        )
        status = "done" if ran.returncode == 0 else "failed"
        error = ran.stderr[-2000:] if ran.returncode else ""
    except subprocess.TimeoutExpired:
        status = "out of time"
    rows, took = _read(part), time.monotonic() - began
    document.record({"name": stage.name, "status": status, "seconds": took, "rows": len(rows), "error": error}, rows)
    print(f"    {status}, {len(rows)} rows in {took:.0f} s\n{error}", file=sys.stderr, flush=True)


def _read(part: Path) -> list[dict[str, Any]]:
    """Whole lines: the last may be cut off."""
    if not part.exists():
        return []
    found = [json.loads(line) for line in part.read_text().splitlines(keepends=True) if line.endswith("\n")]
    part.unlink()
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hack/gpu", description=__doc__)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU: no figure of it means anything")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it (default: %(default)s)")
    parser.add_argument(
        "--part", type=int, choices=range(1, 1 + len(PARTS)), help="only the stages of this part (default: all)"
    )
    parser.add_argument("--skip", action="append", default=[], choices=names, help="leave out a stage")
    parser.add_argument(
        "--stage", action="append", default=[], choices=names, help="only this stage, and the copy rate"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
