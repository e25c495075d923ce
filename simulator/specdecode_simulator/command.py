"""Command line of the simulator: flags, files and processes around the pure simulation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_simulator.errors import SimulatorError
from specdecode_simulator.policies.registry import ALL, CHAINS
from specdecode_simulator.records.recordings import library, nearest
from specdecode_simulator.scoring.earlier import compared
from specdecode_simulator.scoring.matrix import Cell, Matrix
from specdecode_simulator.scoring.plots import plot, prepare
from specdecode_simulator.scoring.table import markdown, text
from specdecode_simulator.scoring.tune import HOURS, SEEDS, tuned
from specdecode_simulator.traces.catalogue import OF_RECORD, TRACES
from specdecode_simulator.world.fleet import POLL_SECONDS

PROGRAM = "specdecode-simulate"
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 1.0, 600.0


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0 with figures on standard output, 1 for missing input, 2 for wrong names or flags."""
    args = _parser().parse_args(argv)
    if args.list:
        print("traces:  ", *TRACES, "\npolicies:", *ALL)
        return 0
    problem = _problem(args)
    if problem:
        print(f"{PROGRAM}: {problem}; see --list", file=sys.stderr)
        return 2
    try:
        return _tune(args) if args.tune else _simulate(args)
    except (SimulatorError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        PROGRAM, description="Compare the operator with other rules and with oracles on modelled workers"
    )
    parser.add_argument("--trace", action="append", default=[], metavar="NAME", help="repeat for more (default: all)")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="repeat for more (default: rules of scaling on traces that are scaled, rules of depth on the others)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of every trace (default: %(default)s)")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="first of the seeds; 10 to 19 are for final tables only (default: 0)"
    )
    parser.add_argument("--hours", type=float, default=4.0, help="simulated, of every trace (default: %(default)s)")
    parser.add_argument(
        "--poll-seconds", type=float, default=POLL_SECONDS, help="time between two polls (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument(
        "--decisions", action="store_true", help="with --json: the operator's plan changes of the first seed, too"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write PNG plots and a Markdown table there")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write every run there as it ends, and do not repeat what is there; with and without --chains alike",
    )
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="compare ours with the runs that --keep of an earlier version wrote"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--recordings", type=Path, metavar="DIR", help="default: benchmarks/recordings of a checkout")
    parser.add_argument(
        "--deployment",
        type=Path,
        metavar="FILE",
        help="a SpecDecodeDeployment as JSON: its spec.speculation (bounds, stability, ...) instead of defaults",
    )
    parser.add_argument("--chains", action="store_true", help="no trees: for the operator and for the oracles")
    parser.add_argument("--list", action="store_true", help="names of traces and policies")
    parser.add_argument("--tune", action="store_true", help="tune the other rules; prints tuned-baselines.json")
    return parser


def _problem(args: argparse.Namespace) -> str | None:
    """Return the problem of the flags' values, or None."""
    unknown = [name for name in args.trace if name not in TRACES] + [name for name in args.policy if name not in ALL]
    if unknown:
        return f"no such trace or policy: {', '.join(unknown)}"
    if args.seeds < 1 or args.hours <= 0 or args.jobs < 1 or args.first_seed < 0:
        return "--seeds, --hours, --jobs are positive, and --first-seed is not negative"
    if not MIN_POLL_SECONDS <= args.poll_seconds <= MAX_POLL_SECONDS:
        return f"--poll-seconds is {MIN_POLL_SECONDS:g} to {MAX_POLL_SECONDS:g}"
    return None


def _simulate(args: argparse.Namespace) -> int:
    """Run traces and policies, and print their scores."""
    matrix = Matrix(
        traces=tuple(args.trace or OF_RECORD),
        policies=tuple(args.policy),
        seeds=args.seeds,
        first_seed=args.first_seed,
        hours=args.hours,
        recordings=args.recordings or nearest(),
        speculation=_speculation(args),
        keep=args.keep,
        poll_seconds=args.poll_seconds,
    )
    if args.plot:
        prepare(args.plot)
    runs = matrix.by_trace(_run_with_progress(matrix, args.jobs))
    document = matrix.document(runs, decisions=args.decisions)
    if args.against:
        document["against"] = compared(matrix, runs, args.against)
    if args.plot:
        _write(document, args.plot)
    print(json.dumps(document, indent=1) if args.json else text(document))
    return 0


def _run_with_progress(matrix: Matrix, jobs: int) -> Iterator[Cell]:
    """Run the matrix with a line for each finished run on standard error."""
    count = len(matrix.cells())
    for done, cell in enumerate(matrix.run(jobs), start=1):
        print(f"simulate: {cell[0]}, seed {cell[1]} ({done} of {count})", file=sys.stderr, flush=True)
        yield cell


def _speculation(args: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return the fields of spec.speculation that replace the defaults."""
    given = _read_speculation(args.deployment) if args.deployment else {}
    return {**given, **(CHAINS if args.chains else {})} or None


def _read_speculation(path: Path) -> Mapping[str, Any]:
    """Read spec.speculation of a deployment's JSON.

    Raises:
        SimulatorError: The file is missing or is no SpecDecodeDeployment.
    """
    try:
        spec = Spec.model_validate(json.loads(path.read_text())["spec"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise SimulatorError(f"--deployment: {path} is no SpecDecodeDeployment as JSON: {error}") from error
    return spec.speculation.model_dump(mode="json", by_alias=True, exclude={"method", "draft", "tasks"})


def _tune(args: argparse.Namespace) -> int:
    """Tune the other systems' rules and print the document of tuned-baselines.json."""
    file = args.keep / "tune.jsonl" if args.keep else None
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file and file.exists() else []

    def note(key: str, cost: float) -> None:
        if file:
            with file.open("a") as kept:
                kept.write(json.dumps([key, cost]) + "\n")

    policies = tuned(
        library(args.recordings or nearest()),
        lambda line: print(f"tune: {line}", file=sys.stderr, flush=True),
        dict(map(json.loads, lines)),
        note,
    )
    document = {"command": f"{PROGRAM} --tune", "seeds": SEEDS, "hours": HOURS, "policies": policies}
    print(json.dumps(document, indent=1))
    return 0


def _write(document: Mapping[str, Any], folder: Path) -> None:
    """Write plots and the Markdown table."""
    for path in plot(document, folder):
        print(f"simulate: {path}", file=sys.stderr)
    (folder / "simulate-table.md").write_text(markdown(document))
