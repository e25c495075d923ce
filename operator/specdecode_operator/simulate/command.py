"""``specdecode-operator simulate``: flags, files and processes around the pure simulation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from specdecode_operator.errors import SettingsError

HERE = Path(__file__).resolve()
RECORDINGS = ("ranks-smollm2.json", "steps-smollm2-cpu.json", "steps-published.json")
TUNED = "tuned-baselines.json"
QUIET_STEPS = 200
"""The first steps of the recorded series, before a neighbour woke up; the whole is a world of its own."""


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
    parser.add_argument("--tune", action="store_true", help=f"tune the baselines anew; prints {TUNED}")


def run(args: argparse.Namespace) -> int:
    """0 with figures on standard output, 1 for what is missing, 2 for wrong names."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("specdecode-operator simulate: numpy is missing; install specdecode[simulate]", file=sys.stderr)
        return 1
    from specdecode_operator.simulate.catalogue import TRACES
    from specdecode_operator.simulate.policies.registry import ALL

    if args.list:
        print("traces:  ", *TRACES, "\npolicies:", *ALL)
        return 0
    traces = args.trace or list(TRACES)
    unknown = [name for name in traces if name not in TRACES] + [name for name in args.policy if name not in ALL]
    if unknown or args.seeds < 1 or args.hours <= 0 or args.jobs < 1:
        what = f"no such trace or policy: {', '.join(unknown)}" if unknown else "--seeds, --hours, --jobs are positive"
        print(f"specdecode-operator simulate: {what}; see --list", file=sys.stderr)
        return 2
    try:
        folder = args.recordings or _recordings()
        if args.tune:
            return _tune(folder)
        given = _given(args.deployment) if args.deployment else None
        document = simulate(
            traces,
            args.policy,
            args.seeds,
            args.hours,
            folder,
            jobs=args.jobs,
            given=given,
            keep=args.keep,
            decisions=args.decisions,
        )
        if args.plot:
            _write(document, args.plot)
    except (SettingsError, OSError) as error:
        print(f"specdecode-operator simulate: {error}", file=sys.stderr)
        return 1
    from specdecode_operator.simulate.table import text

    print(json.dumps(document, indent=1) if args.json else text(document))
    return 0


def _given(path: Path) -> Mapping[str, Any]:
    """spec.speculation of a deployment's JSON. Raises SettingsError."""
    from pydantic import ValidationError

    from specdecode_operator.api.v1alpha1 import Spec

    try:
        spec = Spec.model_validate(json.loads(path.read_text())["spec"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise SettingsError(f"--deployment: {path} is no SpecDecodeDeployment as JSON: {error}") from error
    return spec.speculation.model_dump(mode="json", by_alias=True, exclude={"method", "draft", "tasks"})


def simulate(
    traces: Sequence[str],
    policies: Sequence[str],
    seeds: int,
    hours: float,
    folder: Path,
    *,
    jobs: int = 1,
    given: Mapping[str, Any] | None = None,
    keep: Path | None = None,
    decisions: bool = False,
) -> dict[str, Any]:
    """The whole document. Without ``policies`` those run that a trace is there to judge, and the oracles always;
    ``given`` are fields of spec.speculation for ours; ``keep`` is a folder of runs that ended, of this code, length and
    fields. Progress goes to standard error."""
    from specdecode_operator.simulate.score import by_policy, scored, targets

    who = {name: _policies(name, hours, policies) for name in traces}
    # Seed by seed: what was kept when somebody stopped it is whole for fewer seeds, and not for fewer traces.
    tasks = [(name, hours, seed, who[name], folder, given, keep) for seed in range(seeds) for name in traces]
    found: dict[str, dict[int, Any]] = {name: {} for name in traces}
    for done, (name, seed, runs) in enumerate(_all(tasks, jobs), start=1):
        found[name][seed] = runs
        print(f"simulate: {name}, seed {seed} ({done} of {len(tasks)})", file=sys.stderr, flush=True)
    document: dict[str, Any] = {
        "command": _command(traces, policies, seeds, hours),
        "hours": hours,
        "seeds": list(range(seeds)),
        "traces": {name: _trace_document(name, hours, found[name], scored, decisions) for name in traces},
    }
    document["policies"], document["targets"] = by_policy(document), targets(document)
    return document


def _policies(trace: str, hours: float, named_ones: Sequence[str]) -> tuple[str, ...]:
    from specdecode_operator.simulate.catalogue import named
    from specdecode_operator.simulate.policies.registry import judged_on
    from specdecode_operator.simulate.score import CLAIRVOYANT, ORACLE

    return tuple(dict.fromkeys((*(named_ones or judged_on(named(trace, hours).family)), ORACLE, CLAIRVOYANT)))


def _command(traces: Sequence[str], policies: Sequence[str], seeds: int, hours: float) -> str:
    from specdecode_operator.simulate.catalogue import TRACES

    which = "" if set(traces) == set(TRACES) else "".join(f" --trace {name}" for name in traces)
    which += "".join(f" --policy {name}" for name in policies)
    return f"specdecode-operator simulate{which} --seeds {seeds} --hours {hours:g}"


def _trace_document(
    name: str, hours: float, by_seed: Mapping[int, Any], scored: Any, decisions: bool
) -> dict[str, Any]:
    from specdecode_operator.simulate.catalogue import named

    runs = {seed: by_seed[seed] for seed in sorted(by_seed)}
    ours = [found["ours"] for found in runs.values() if "ours" in found]
    document = {
        "family": named(name, hours).family,
        "policies": scored(runs),
        "answers": [answer for run in ours for answer in run.answers],
    }
    return {**document, "decisions": list(ours[0].decisions)} if ours and decisions else document


def _all(tasks: Sequence[Any], jobs: int) -> Iterator[tuple[str, int, Any]]:
    if jobs == 1:
        yield from map(_one, tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_one, task) for task in tasks]):
            yield future.result()


def _one(
    task: tuple[str, float, int, Iterable[str], Path, Mapping[str, Any] | None, Path | None],
) -> tuple[str, int, Any]:
    from specdecode_operator.simulate.run import run_trace

    name, hours, seed, policies, folder, given, keep = task
    path = folder / TUNED
    tuned = json.loads(path.read_text())["policies"] if path.exists() else {}
    tuned = {**tuned, "ours": given} if given else tuned
    file = None if keep is None else keep / f"{name}-{hours:g}h-{seed}.jsonl"
    kept, found = _kept(file), {}
    for policy, run in run_trace(name, hours, seed, policies, library(folder), tuned, kept):
        if file is not None and policy not in kept:
            _keep(file, policy, run)
        found[policy] = run
    return name, seed, found


def _kept(file: Path | None) -> dict[str, Any]:
    """Runs of a trace and a seed that ended. A last line that was cut off is dropped. Raises SettingsError."""
    from specdecode_operator.simulate.run import of_json

    if file is None or not file.exists():
        return {}
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    try:
        return {document["policy"]: of_json(document) for document in map(json.loads, whole.splitlines())}
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"--keep: {file} holds no runs of this version; remove it: {error}") from error


def _keep(file: Path, policy: str, run: Any) -> None:
    from specdecode_operator.simulate.run import as_json

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps({"policy": policy, **as_json(run)}) + "\n")


_LIBRARIES: dict[Path, Any] = {}


def library(folder: Path) -> Any:
    """Step tables and rank records of a folder, read once. Raises SettingsError where a file is missing or wrong."""
    from specdecode_operator.simulate.steptimes import published, recorded
    from specdecode_operator.simulate.walks import Records
    from specdecode_operator.simulate.world import Library

    if folder not in _LIBRARIES:
        try:
            ranks, steps, figures = (json.loads((folder / name).read_text()) for name in RECORDINGS)
            quiet = {**steps, "series": steps["series"][:QUIET_STEPS]}
            busy = recorded(steps)
            tables = {"smollm2-cpu": recorded(quiet), "smollm2-cpu-busy": busy, **published(figures)}
            _LIBRARIES[folder] = Library(Records.of(ranks), tables)
        except (OSError, KeyError, ValueError) as error:
            raise SettingsError(f"{folder} has no usable recordings: {error}; see benchmarks/recordings") from error
    return _LIBRARIES[folder]


def _recordings() -> Path:
    """Of the checkout that this runs from, or in the working directory."""
    for base in (Path.cwd(), *HERE.parents):
        folder = base / "benchmarks" / "recordings"
        if (folder / RECORDINGS[0]).exists():
            return folder
    raise SettingsError("no recordings here; name a checkout's benchmarks/recordings with --recordings")


def _tune(folder: Path) -> int:
    from specdecode_operator.simulate.tune import HOURS, SEED, tuned

    found = tuned(library(folder), lambda line: print(f"tune: {line}", file=sys.stderr, flush=True))
    command = "specdecode-operator simulate --tune"
    print(json.dumps({"command": command, "seed": SEED, "hours": HOURS, "policies": found}, indent=1))
    return 0


def _write(document: Mapping[str, Any], folder: Path) -> None:
    from specdecode_operator.simulate.plots import plot
    from specdecode_operator.simulate.table import markdown

    for path in plot(document, folder):
        print(f"simulate: {path}", file=sys.stderr)
    (folder / "simulate-table.md").write_text(markdown(document))
