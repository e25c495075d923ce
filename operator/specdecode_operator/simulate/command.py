"""``specdecode-operator simulate``: flags, files and processes around the pure simulation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdecode_operator.errors import SettingsError

if TYPE_CHECKING:
    from specdecode_operator.simulate.matrix import Matrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", action="append", default=[], metavar="NAME", help="repeat for more (default: all)")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="repeat for more (default: rules of scaling on traces that are scaled, rules of depth on the others)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of every trace (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=4.0, help="simulated, of every trace (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument(
        "--decisions", action="store_true", help="with --json: ours' plan changes of the first seed, too"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write PNG plots and a Markdown table there")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="write every run there as it ends, and don't run again what is there"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--recordings", type=Path, metavar="DIR", help="default: benchmarks/recordings of a checkout")
    parser.add_argument(
        "--deployment",
        type=Path,
        metavar="FILE",
        help="a SpecDecodeDeployment as JSON: its spec.speculation (bounds, hysteresis, ...) instead of defaults",
    )
    parser.add_argument("--list", action="store_true", help="names of traces and policies")
    parser.add_argument("--tune", action="store_true", help="tune the baselines anew; prints tuned-baselines.json")


def run(args: argparse.Namespace) -> int:
    """0 with figures on standard output, 1 for what is missing, 2 for wrong names."""
    try:
        import numpy  # noqa: F401  (the operator's image has none, so nothing that wants it is imported before)
    except ImportError:
        print("specdecode-operator simulate: numpy is missing; install specdecode[simulate]", file=sys.stderr)
        return 1
    from specdecode_operator.simulate.catalogue import TRACES
    from specdecode_operator.simulate.policies.registry import ALL

    if args.list:
        print("traces:  ", *TRACES, "\npolicies:", *ALL)
        return 0
    unknown = [name for name in args.trace if name not in TRACES] + [name for name in args.policy if name not in ALL]
    if unknown or args.seeds < 1 or args.hours <= 0 or args.jobs < 1:
        what = f"no such trace or policy: {', '.join(unknown)}" if unknown else "--seeds, --hours, --jobs are positive"
        print(f"specdecode-operator simulate: {what}; see --list", file=sys.stderr)
        return 2
    try:
        return _tune(args) if args.tune else _simulate(args)
    except (SettingsError, OSError) as error:
        print(f"specdecode-operator simulate: {error}", file=sys.stderr)
        return 1


def _simulate(args: argparse.Namespace) -> int:
    from specdecode_operator.simulate.catalogue import TRACES
    from specdecode_operator.simulate.matrix import Matrix, by_trace
    from specdecode_operator.simulate.plots import prepare
    from specdecode_operator.simulate.recordings import nearest
    from specdecode_operator.simulate.table import text

    matrix = Matrix(
        traces=tuple(args.trace or TRACES),
        policies=tuple(args.policy),
        seeds=args.seeds,
        hours=args.hours,
        recordings=args.recordings or nearest(),
        speculation=_speculation(args.deployment) if args.deployment else None,
        keep=args.keep,
    )
    if args.plot:
        prepare(args.plot)
    document = matrix.document(by_trace(_told(matrix, args.jobs)), decisions=args.decisions)
    if args.plot:
        _write(document, args.plot)
    print(json.dumps(document, indent=1) if args.json else text(document))
    return 0


def _told(matrix: Matrix, jobs: int) -> Iterator[Any]:
    """What ``matrix`` runs, with a line for each on standard error."""
    count = len(matrix.cells())
    for done, cell in enumerate(matrix.run(jobs), start=1):
        print(f"simulate: {cell[0]}, seed {cell[1]} ({done} of {count})", file=sys.stderr, flush=True)
        yield cell


def _speculation(path: Path) -> Mapping[str, Any]:
    """spec.speculation of a deployment's JSON. Raises SettingsError."""
    from pydantic import ValidationError

    from specdecode_operator.api.v1alpha1 import Spec

    try:
        spec = Spec.model_validate(json.loads(path.read_text())["spec"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise SettingsError(f"--deployment: {path} is no SpecDecodeDeployment as JSON: {error}") from error
    return spec.speculation.model_dump(mode="json", by_alias=True, exclude={"method", "draft", "tasks"})


def _tune(args: argparse.Namespace) -> int:
    from specdecode_operator.simulate.recordings import library, nearest
    from specdecode_operator.simulate.tune import HOURS, SEED, tuned

    policies = tuned(
        library(args.recordings or nearest()), lambda line: print(f"tune: {line}", file=sys.stderr, flush=True)
    )
    command = "specdecode-operator simulate --tune"
    print(json.dumps({"command": command, "seed": SEED, "hours": HOURS, "policies": policies}, indent=1))
    return 0


def _write(document: Mapping[str, Any], folder: Path) -> None:
    from specdecode_operator.simulate.plots import plot
    from specdecode_operator.simulate.table import markdown

    for path in plot(document, folder):
        print(f"simulate: {path}", file=sys.stderr)
    (folder / "simulate-table.md").write_text(markdown(document))
