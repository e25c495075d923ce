"""Program of `hack/gpu`: run each stage within its time, and write a JSON and a page after each.

A run that is ended early leaves a valid document, which names the stages that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from card import described
from gpu_tests import run_tests
from page import page
from stages import PARTS, STAGES, TESTS, TESTS_PROCESSES, Stage
from targets import judge
from timings_file import timings_of

from specdecode_kernels.timings import written

HERE = Path(__file__).parent
FORMAT = 1
DRY_PATIENCE = 5
"""Factor of all times of a dry run, for slow processors; it measures nothing."""


@dataclass(slots=True)
class Document:
    """What is written."""

    out: Path
    machine: dict[str, Any]
    dry_run: bool
    stages: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

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
            self.out: json.dumps(body, indent=1) + "\n",
            self.out.with_suffix(".md"): page(body),
            self.timings: written(timings_of(self.machine["gpu"], self.rows)) + "\n",
        }
        for path, text in texts.items():
            part = path.with_suffix(".part")
            part.write_text(text)
            part.replace(path)

    @property
    def timings(self) -> Path:
        """Path of the file of kernel timings."""
        return self.out.with_name(f"kernel-timings-{self.out.stem}.json")

    @property
    def rate(self) -> float:
        """Bytes read a second, the reference of all floors; 0 while unknown."""
        return next((1e9 * float(row["read_gigabytes_per_second"]) for row in self.rows if row["kind"] == "copy"), 0.0)


def main() -> int:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.dry_run:
        import stand_in

        stand_in.install()
    machine = described(args.dry_run)
    stem = "dry-run" if args.dry_run else f"gpu-{machine['short_name']}-{machine['date']}"
    stem += f"-part-{args.part}" if args.part else ""
    document = Document(args.out / f"{stem}.json", machine, args.dry_run)
    document.write()
    patience = DRY_PATIENCE if args.dry_run else 1
    until = time.monotonic() + patience * args.seconds
    for stage in PARTS[args.part - 1] if args.part else STAGES:
        if not _wanted(stage.name, args):
            continue
        seconds = min(patience * stage.budget_seconds, until - time.monotonic())
        if stage.name == TESTS:
            log, processes = args.out / f"{stem}-tests.log", 1 if args.dry_run else TESTS_PROCESSES
            document.stages.append(run_tests(log, seconds, processes=processes, dry=args.dry_run))
        else:
            _run(stage, document, seconds)
        document.write()
    print(document.out)
    print(document.out.with_suffix(".md"))
    print(document.timings)
    return 0 if all(stage["status"] == "done" for stage in document.stages) else 1


def _wanted(name: str, args: argparse.Namespace) -> bool:
    """Return True if a stage runs. The copy rate, the reference of all figures, is measured for every choice."""
    return name not in args.skip and (not args.stage or name in args.stage or name == "copy")


def _run(stage: Stage, document: Document, seconds: float) -> None:
    began = time.monotonic()
    part = document.out.with_suffix(f".{stage.name}.jsonl")
    part.unlink(missing_ok=True)
    if seconds < 5:
        document.stages.append({"name": stage.name, "status": "no time was left", "seconds": 0.0})
        return
    command = [sys.executable, str(HERE / "stage.py"), stage.name, str(part), str(document.rate)]
    if document.dry_run:
        command.append("--dry-run")
    environment = dict(os.environ, TRITON_INTERPRET="1" if document.dry_run and stage.interpreted else "0")
    print(f"==> {stage.name}, {seconds:.0f} s at most", file=sys.stderr, flush=True)
    error = ""
    try:
        ran = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=seconds)
        status = "done" if ran.returncode == 0 else "failed"
        error = ran.stderr[-2000:] if ran.returncode else ""
    except subprocess.TimeoutExpired:
        status = "out of time"
    rows = _read(part)
    document.rows += rows
    took = time.monotonic() - began
    document.stages.append({"name": stage.name, "status": status, "seconds": took, "rows": len(rows), "error": error})
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
    parser.add_argument("--seconds", type=float, default=600, help="for all of it (default: %(default)s)")
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
