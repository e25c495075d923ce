"""Measure what each rule and each group of constants of the planner is worth, in the simulator.

Each variant switches one rule off, or halves or doubles one group of constants, and runs ``ours`` and the constrained
oracle on the same traces and seeds as the planner as it is. Results are stored run by run, so that a stopped command
continues where it was.

    .venv/bin/python benchmarks/planner_ablation.py rules --jobs 2          # 25 traces, three seeds, one hour each
    .venv/bin/python benchmarks/planner_ablation.py constants --jobs 2      # six traces
    .venv/bin/python benchmarks/planner_ablation.py table                   # what is stored so far, as Markdown

The columns of the table: time per token over the constrained oracle's (mean over traces, and the worst trace), plan
changes an hour on stationary traces, and steps of acceptance that were answered in time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import planner_candidate

from specdecode_operator.planning import acceptance, learn, look, moves, options, rows, trials
from specdecode_simulator.policies.registry import SCALERS
from specdecode_simulator.records.recordings import library, nearest, tuned
from specdecode_simulator.scoring.run import as_json, run_trace
from specdecode_simulator.traces.catalogue import TRACES, named

SIX_TRACES = ("steady-cpu-quiet", "acceptance-step", "task-mix", "load-swings", "steady-gpu-tasks", "mislabelled")
BASE = "as it is"
OURS, ORACLE = "ours", "constrained"
assert OURS not in SCALERS

# --- variants ---------------------------------------------------------------------------------------------------------


def set_everywhere(module: Any, name: str, value: object) -> None:
    """Replace a module's global, also where other modules of the planner have imported it."""
    before = getattr(module, name)
    for other in list(sys.modules.values()):
        is_planner = getattr(other, "__name__", "").startswith("specdecode_operator.planning")
        if is_planner and name in vars(other) and vars(other)[name] is before:
            setattr(other, name, value)


def _fixed_patience(look_: Any, change: Any) -> Any:
    """Return a stopped row with the shortest patience, however often speculation came back in vain."""
    if change.row.depth:
        return change
    patience = max(float(look_.speculation.hysteresis.min_dwell_seconds), 1.0)
    waiting = change.row.model_copy(update={"patience": patience, "off_until": look_.now + patience})
    return replace(change, row=waiting)


def _rows_without_order(speculation: Any, learned: Any, found: Any) -> Any:
    """Return rows that follow ``other``, but are not bounded by the row of the nearest lower load."""
    original_size = rows._size
    rows._size = lambda shape: (0, 0)  # type: ignore[assignment]  # min() then keeps the row's own shape
    try:
        yield from list(_rows_of(speculation, learned, found))
    finally:
        rows._size = original_size


_rows_of = rows.rows_of


def nothing(*_: object) -> list[Any]:
    """Return no change."""
    return []


RULES: dict[str, Callable[[], None]] = {
    "stop": lambda: set_everywhere(moves, "_stopped", nothing),
    "retreat": lambda: set_everywhere(moves, "_retreated", nothing),
    "gain": lambda: set_everywhere(moves, "_improved", nothing),
    "trial": lambda: set_everywhere(trials, "begun", nothing),
    "probe": lambda: set_everywhere(trials, "probes", nothing),
    "patience grows": lambda: (
        set_everywhere(moves, "_patient", _fixed_patience),
        set_everywhere(trials, "LONGEST_PATIENCE_SECONDS", trials.PATIENCE_SECONDS),
    )[0],
    "outdated": lambda: setattr(look.Look, "is_outdated", lambda self, row: False),
    "order of loads": lambda: set_everywhere(rows, "rows_of", _rows_without_order),
    "stay": lambda: set_everywhere(rows, "_staying", lambda busy, moved: iter(())),
    "growth of the dwell": lambda: set_everywhere(look, "GROWTH", 1),
    "design effect": lambda: set_everywhere(acceptance, "design_effect", lambda learned, task: 1.0),
    "request variance": lambda: set_everywhere(options, "UNLIKE", 0.0),
    "only timed depths": lambda: setattr(options.Options, "within_timed", lambda self: list(self.by_shapes)),
    "doubt of deeper rates": lambda: set_everywhere(learn, "_doubted", lambda known, *_: known),
    "change points of rates": lambda: set_everywhere(sys.modules[f"{PLANNING}.change"], "rate_changed", never),
    "all of them: the candidate": lambda: set_everywhere(rows, "moves", planner_candidate.changes),
    "change points of costs": lambda: set_everywhere(sys.modules[f"{PLANNING}.change"], "cost_changed", never),
}
PLANNING = "specdecode_operator.planning"


def never(*_: object, **__: object) -> bool:
    """Return False."""
    return False


GROUPS: dict[str, Sequence[tuple[str, str]]] = {
    "patience": (("trials", "PATIENCE_SECONDS"), ("trials", "LONGEST_PATIENCE_SECONDS"),
                 ("moves", "LONGEST_PATIENCE_SECONDS")),
    "trial": (("trials", "TRIAL_GAIN"), ("trials", "LONGEST_TRIAL_SECONDS"), ("trials", "PROBE_SECONDS")),
    "losses": (("moves", "LEAST_LOSS"), ("moves", "LEAST_LOSS_HELD_BACK")),
    "presence": (("look", "ABSENT_SECONDS"), ("trials", "BUSY_SECONDS"), ("trials", "FRESH_SECONDS")),
    "sweep": (("rows", "SWEEP_SECONDS"), ("rows", "LEAST_DRAFTS")),
    "forgetting of rates": (("learn", "HALF_LIFE_DRAFTS"), ("learn", "HALF_LIFE_REQUESTS")),
    "forgetting of traffic": (("learn", "HALF_LIFE_ARRIVALS"),),
    "forgetting of steps": (("learn_steps", "HALF_LIFE_STEPS"),),
    "forgetting by time": (("forgetting", "HALF_LIFE_SECONDS"), ("forgetting", "GATHER_SECONDS")),
    "surprise": (("change", "SURPRISE"), ("change", "SURPRISE_OF_ALIKE")),
    "contradiction": (("forgetting", "CONTRADICTED_WEIGHT"), ("learn", "DEEPER_WEIGHT")),
    "priors of rates": (("acceptance", "DEPTH_WEIGHT"), ("acceptance", "TASK_WEIGHT"), ("acceptance", "RANK_WEIGHT")),
    "design effect": (("acceptance", "PRIOR_EFFECT"), ("acceptance", "PRIOR_REQUESTS")),
    "correlations": (("options", "ALIKE"), ("options", "UNLIKE")),
    "misfit of step times": (("steptime", "MISFIT"), ("steptime", "DRIFT"), ("steptime", "CARRIED"),
                             ("steptime", "DIFFERENCE_MISFIT")),
    "weight of a cell": (("steptime", "OWN_WEIGHT"),),
    "spells": (("learn_steps", "SPELL_SECONDS"), ("learn_steps", "WANDER_SHARE")),
}  # fmt: skip


def _scaled(group: str, factor: float) -> Callable[[], None]:
    def apply() -> None:
        for module, name in GROUPS[group]:
            target = sys.modules[f"{PLANNING}.{module}"]
            set_everywhere(target, name, getattr(target, name) * factor)

    return apply


def variants(kind: str) -> dict[str, Callable[[], None]]:
    """Return the variants of a kind by name, the planner as it is first."""
    base: dict[str, Callable[[], None]] = {BASE: lambda: None}
    if kind == "rules":
        return base | {f"without {name}" if name != BASE else name: apply for name, apply in RULES.items()}
    halves = {f"{group} x 0.5": _scaled(group, 0.5) for group in GROUPS}
    doubles = {f"{group} x 2": _scaled(group, 2.0) for group in GROUPS}
    return base | halves | doubles


# --- runs -------------------------------------------------------------------------------------------------------------


def run_variant(job: tuple[str, str, tuple[str, ...], Sequence[int], float, Path]) -> str:
    """Run one variant on all traces and seeds; runs that are stored are skipped."""
    kind, name, traces, seeds, hours, folder = job
    variants(kind)[name]()
    settings = tuned(nearest())
    shared = library(nearest())
    for seed in seeds:
        for trace in traces:
            file = folder / f"{kind}-{hours:g}h" / _slug(name) / f"{trace}-{seed}.json"
            if file.exists():
                continue
            runs = {
                policy: as_json(run) for policy, run in run_trace(trace, hours, seed, (OURS, ORACLE), shared, settings)
            }
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            part.write_text(json.dumps({"variant": name, "trace": trace, "seed": seed, "runs": runs}))
            part.rename(file)
    return name


def _slug(name: str) -> str:
    return name.replace(" ", "-")


# --- table ------------------------------------------------------------------------------------------------------------


def table(folder: Path) -> str:
    """Return what is stored as Markdown, a table for each kind and length."""
    return "\n\n".join(_table_of(part) for part in sorted(folder.iterdir()) if part.is_dir())


def _table_of(folder: Path) -> str:
    rows_ = [_row(part) for part in sorted(folder.iterdir())]
    base = next((row for row in rows_ if row["variant"] == BASE), None)
    lines = [
        f"### {folder.name}",
        "",
        "| variant | runs | mean | worst trace | changes/h | answered |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows_, key=lambda row: (row["variant"] != BASE, -row["mean"])):
        change = f" ({row['mean'] - base['mean']:+.4f})" if base and row is not base else ""
        lines.append(
            f"| {row['variant']} | {row['runs']} | {row['mean']:.4f}{change} | {row['worst']:.3f} {row['on']} "
            f"| {row['changes']:.1f} | {row['answered']} of {row['steps']} |"
        )
    return "\n".join(lines)


def _row(folder: Path) -> dict[str, Any]:
    documents = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    ratios: dict[str, list[float]] = {}
    changes, answers = [], []
    for document in documents:
        ours, oracle = (document["runs"][name]["figures"] for name in (OURS, ORACLE))
        ratios.setdefault(document["trace"], []).append(ours["time_per_token"] / oracle["time_per_token"])
        if named(document["trace"], 1.0).family == "stationary":
            changes.append(ours["plan_changes_per_hour"])
        answers += document["runs"][OURS]["answers"]
    means = {trace: sum(values) / len(values) for trace, values in ratios.items()}
    worst = max(means, key=lambda trace: means[trace])
    wide = [answer for answer in answers if answer["within"] > 1.05]
    return {
        "variant": documents[0]["variant"],
        "runs": len(documents),
        "mean": sum(means.values()) / len(means),
        "worst": means[worst],
        "on": worst,
        "changes": sum(changes) / len(changes) if changes else math.nan,
        "answered": int(sum(answer["answered"] for answer in wide)),
        "steps": len(wide),
    }


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(description="Measure what the rules and constants of the planner are worth.")
    parser.add_argument("kind", choices=("rules", "constants", "table"))
    parser.add_argument("--only", action="append", default=[], metavar="VARIANT", help="repeat for more")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("build/ablation"), help="folder of the results")
    args = parser.parse_args(None if arguments is None else list(arguments))
    if args.kind == "table":
        print(table(args.keep))
        return 0
    traces = tuple(TRACES) if args.kind == "rules" else SIX_TRACES
    names = args.only or list(variants(args.kind))
    jobs = [(args.kind, name, traces, tuple(range(args.seeds)), args.hours, args.keep) for name in names]
    # A process for each variant: a variant changes the planner's modules for good.
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for done, name in enumerate(pool.imap_unordered(run_variant, jobs, chunksize=1), start=1):
            print(f"ablation: {name} ({done} of {len(jobs)})", file=sys.stderr, flush=True)
    print(table(args.keep))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
