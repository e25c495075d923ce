"""Measure what each rule and each constant of the planner is worth, in the simulator.

Each variant switches one rule off, or halves or doubles a group of constants, and runs ``ours`` and the constrained
oracle on the same traces and seeds as the planner as it is. Results are stored run by run, so that a stopped command
continues where it was.

    .venv/bin/python benchmarks/planner_ablation.py rules --jobs 2          # 25 traces, three seeds, one hour each
    .venv/bin/python benchmarks/planner_ablation.py constants --jobs 2      # six traces, groups of constants
    .venv/bin/python benchmarks/planner_ablation.py rules --only "as it is" --first-seed 10 --seeds 10 --hours 4
    .venv/bin/python benchmarks/planner_ablation.py table                   # what is stored so far, as Markdown

The columns of the table: time per token over the constrained oracle's (mean over traces, the worst trace, and the
largest loss on a trace against the planner as it is), plan changes an hour on stationary traces, and steps of
acceptance that were answered in time. ``specdecode-simulate --against`` compares the planner with another version.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdecode_operator.planning import (
    acceptance_model,
    estimates,
    learning,
    plan_rows,
    shape_search,
    step_time_model,
    workload,
)
from specdecode_operator.planning.decision_rule import LoadDecision
from specdecode_operator.planning.tuning import TUNING
from specdecode_simulator.policies.registry import SCALERS
from specdecode_simulator.records.recordings import library, nearest, tuned
from specdecode_simulator.scoring.run import as_json, of_json, run_trace
from specdecode_simulator.traces.catalogue import TRACES, named

SIX_TRACES = ("steady-cpu-quiet", "acceptance-step", "task-mix", "load-swings", "steady-gpu-tasks", "mislabelled")
BASE = "as it is"
OURS, ORACLE = "ours", "constrained"
PLANNING = "specdecode_operator.planning"
assert OURS not in SCALERS

# --- variants ---------------------------------------------------------------------------------------------------------


def set_everywhere(module: Any, name: str, value: object) -> None:
    """Replace a module's global, also where other modules of the planner have imported it."""
    before = getattr(module, name)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith(PLANNING) and vars(other).get(name) is before:
            setattr(other, name, value)


def set_tuning(**values: float) -> None:
    """Replace constants of the planner."""
    set_everywhere(sys.modules[f"{PLANNING}.tuning"], "TUNING", replace(TUNING, **values))


def _set_rule(name: str, result: object) -> Callable[[], None]:
    return lambda: setattr(LoadDecision, name, lambda *_: result)


def _first_reports_unread(learned: Any, reports: Any, found: Any, *, now: float) -> Any:
    return learned


def _no_suspended_loads() -> None:
    setattr(LoadDecision, "is_suspended", property(lambda _: False, lambda *_: None))  # noqa: B010 - typed read-only


def _mean_batches(shapes: Any, bounds: Any, shares: Any, sequences: float) -> list[Any]:
    """Return one batch, with the deepest shape and the mean nodes."""
    verified = 1 + sum(shares[name] * shape.nodes for name, shape in shapes)
    passes = max(bounds[name].passes(shape.depth) for name, shape in shapes)
    batch = step_time_model.Batch(passes, round(verified, 1))
    return [shape_search.Met(name, batch, 1.0) for name, _ in shapes]


def _unknown_requests(learned: Any, tasks: Iterable[str]) -> dict[str, float]:
    return dict.fromkeys(tasks, math.inf)


RULES: dict[str, Callable[[], None]] = {
    "stop": _set_rule("_stopped", []),
    "fewer passes": _no_suspended_loads,
    "gain": _set_rule("_is_worth_it", False),
    "trial": _set_rule("_trial_value", -1.0),
    "outdated": _set_rule("_is_outdated", False),
    "order of loads": lambda: set_everywhere(plan_rows, "attrgetter", lambda *_: lambda shape: 0),
    "design effect": lambda: set_everywhere(acceptance_model, "design_effect", lambda learned, task: 1.0),
    "request variance": lambda: set_tuning(request_spread=0.0),
    "doubt of deeper rates": lambda: set_everywhere(learning, "_doubted", lambda cell: cell),
    "change points of rates": lambda: set_everywhere(estimates, "rate_changed", lambda *_, **__: False),
    "change points of times": lambda: set_everywhere(estimates, "time_changed", lambda *_, **__: False),
    "wander": lambda: set_everywhere(learning, "_wander", lambda learned, delta: 0.0),
    "rising step times": lambda: set_everywhere(step_time_model, "_rising", lambda order, lines, found: list(found)),
    "times before serving": lambda: set_everywhere(learning, "learn_first_reports", _first_reports_unread),
    "stop of idle rows": lambda: set_everywhere(plan_rows, "_also_stopped", lambda row, speculation, now: None),
    "idle tasks": lambda: set_everywhere(workload, "idle", lambda learned, tasks: frozenset()),
    "other batches": lambda: set_everywhere(shape_search, "batches", _mean_batches),
    "requests of a task": lambda: set_everywhere(workload, "_requests_by_task", _unknown_requests),
    "correlation of depths": lambda: set_tuning(depth_correlation=0.0),
    "prior of all tasks": lambda: set_tuning(task_prior_drafts=0.1),
    "tasks that are active": _set_rule("_is_active", True),
    "measuring": _set_rule("_is_measuring", False),
    "drift": lambda: set_tuning(drift_per_dwell=0.0),
}

OF_SEVERAL_TASKS = {
    f"without {rule}"
    for rule in (
        "stop of idle rows",
        "idle tasks",
        "other batches",
        "prior of all tasks",
        "tasks that are active",
    )
}
"""Variants that equal the planner as it is on traces of one task, whose runs they take from there."""

GROUPS = {
    "priors of acceptance": ("prior_drafts", "task_prior_drafts", "rank_share"),
    "design effect": ("prior_effect", "prior_requests"),
    "correlations": ("depth_correlation", "request_spread"),
    "half-lives": ("half_life_drafts", "half_life_samples"),
    "recent seconds": ("recent_seconds",),
    "change points": ("rate_change_errors", "time_change_errors", "contradicted_weight"),
    "fewest samples": ("min_samples",),
    "errors of step times": ("model_error", "carried_error"),
    "wander": ("wander_share", "wander_limit"),
    "confidence": ("z", "z_changed"),
    "error of a trial": ("measured_error",),
    "drift": ("drift_per_dwell",),
    "window": ("window_seconds",),
    "least share": ("least_share",),
    "samples of figures": ("fleet_samples", "task_samples"),
}
"""Constants that are halved and doubled together: all but ``load_ratio``, which must be above 1, ``least_seconds`` and
``context_edges``."""


def variants(kind: str) -> dict[str, Callable[[], None]]:
    """Return the variants of a kind by name, the planner as it is first."""
    base: dict[str, Callable[[], None]] = {BASE: lambda: None}
    if kind == "rules":
        return base | {f"without {name}": apply for name, apply in RULES.items()}
    return base | {
        f"{group} x {factor:g}": (lambda names=names, by=factor: set_tuning(**_scaled(names, by)))
        for group, names in GROUPS.items()
        for factor in (0.5, 2.0)
    }


def _scaled(names: Iterable[str], by: float) -> dict[str, float]:
    return {name: by * getattr(TUNING, name) for name in names}


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
            file.parent.mkdir(parents=True, exist_ok=True)
            base = _base_file(file)
            if name in OF_SEVERAL_TASKS and base.exists() and len(named(trace, hours).kinds) == 1:
                _store(file, json.loads(base.read_text()) | {"variant": name})
                continue
            known = {ORACLE: oracle} if (oracle := _stored_oracle(file, trace, hours)) else {}
            ran = run_trace(trace, hours, seed, (OURS, ORACLE), shared, settings, known)
            runs = {policy: as_json(run) for policy, run in ran}
            _store(file, {"variant": name, "trace": trace, "seed": seed, "runs": runs})
    return name


def _store(file: Path, document: Mapping[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.rename(file)


def _base_file(file: Path) -> Path:
    """Return the file of the planner as it is, for the trace and seed of a variant's file."""
    return file.parent.parent / _slug(BASE) / file.name


def _stored_oracle(file: Path, trace: str, hours: float) -> Any:
    """Return the oracle's run of the planner as it is. On traces that scale it follows the variant's replicas."""
    base = _base_file(file)
    if not base.exists() or named(trace, hours).family == "scaling":
        return None
    return of_json(json.loads(base.read_text())["runs"][ORACLE])


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
        "| variant | runs | mean | worst trace | largest loss | changes/h | answered |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows_, key=lambda row: (row["variant"] != BASE, -row["mean"])):
        change = f" ({row['mean'] - base['mean']:+.4f})" if base and row is not base else ""
        lines.append(
            f"| {row['variant']} | {row['runs']} | {row['mean']:.4f}{change} | {_worst(row['means'])} "
            f"| {_largest_loss(row, base)} | {row['changes']:.1f} | {row['answered']} of {row['steps']} |"
        )
    return "\n".join(lines)


def _worst(means: Mapping[str, float]) -> str:
    worst = max(means, key=lambda trace: means[trace])
    return f"{means[worst]:.3f} {worst}"


def _largest_loss(row: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    """Return what the variant loses against the planner as it is on the trace where that is most."""
    if base is None or row is base:
        return ""
    losses = {trace: mean - base["means"][trace] for trace, mean in row["means"].items() if trace in base["means"]}
    most = max(losses, key=lambda trace: losses[trace])
    return f"{losses[most]:+.3f} {most}" if losses[most] > 0 else "none"


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
    wide = [answer for answer in answers if answer["within"] > 1.05]
    return {
        "variant": documents[0]["variant"],
        "runs": len(documents),
        "mean": sum(means.values()) / len(means),
        "means": means,
        "changes": sum(changes) / len(changes) if changes else math.nan,
        "answered": int(sum(answer["answered"] for answer in wide)),
        "steps": len(wide),
    }


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command of the command line."""
    parser = argparse.ArgumentParser(description="Measure what the rules and constants of the planner are worth.")
    parser.add_argument("kind", choices=("rules", "constants", "table"))
    parser.add_argument("--only", action="append", default=[], metavar="VARIANT", help="repeat for more")
    parser.add_argument("--first-seed", type=int, default=0, help="seeds 10 to 19 are for final tables only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME", help="repeat for more")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("build/ablation"), help="folder of the results")
    args = parser.parse_args(None if arguments is None else list(arguments))
    if args.kind == "table":
        print(table(args.keep))
        return 0
    seeds = tuple(range(args.first_seed, args.first_seed + args.seeds))
    traces = tuple(args.trace) or (tuple(TRACES) if args.kind == "rules" else SIX_TRACES)
    names = args.only or list(variants(args.kind))
    jobs = [(args.kind, name, traces, seeds, args.hours, args.keep) for name in names]
    # A process for each variant: a variant changes the planner's modules for good.
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for done, name in enumerate(pool.imap_unordered(run_variant, jobs, chunksize=1), start=1):
            print(f"ablation: {name} ({done} of {len(jobs)})", file=sys.stderr, flush=True)
    print(table(args.keep))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
