"""The ablation of the planner: every variant still changes the planner that there is."""

from __future__ import annotations

import importlib
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.planning.tuning import Tuning

TRACE, HOURS = "task-mix", 0.02
LEFT_OUT = {"load_ratio", "least_seconds", "context_edges"}


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("planner_ablation")


def run_apart(ablation: Any, jobs: list[Any]) -> list[str]:
    """Run a process for each variant, as the command does: a variant changes the planner's modules for good.

    They are forked from a process that has imported the simulator, and has no threads as this one may have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["specdecode_simulator.policies.registry", "specdecode_simulator.scoring.run"])
    with context.Pool(2, maxtasksperchild=1) as pool:
        return pool.map(ablation.run_variant, jobs, chunksize=1)


@pytest.mark.parametrize("kind", ["rules", "constants"])
def test_every_variant_runs(ablation: Any, kind: str, tmp_path: Path) -> None:
    """A variant that names what the planner no longer has, or calls it in an outdated way, fails."""
    names = list(ablation.variants(kind))
    jobs = [(kind, name, (TRACE,), (0,), HOURS, tmp_path) for name in names]
    assert run_apart(ablation, jobs) == names
    files = sorted(tmp_path.rglob("*.json"))
    assert len(files) == len(names)
    assert all(set(json.loads(file.read_text())["runs"]) == {"ours", "constrained"} for file in files)
    rows = ablation.table(tmp_path).splitlines()[4:]
    assert rows[0].startswith("| as it is | 1 |")
    assert len(rows) == len(names)


def test_rules_of_several_tasks_do_not_matter_to_one(ablation: Any, tmp_path: Path) -> None:
    """Their runs on such traces are taken from the planner as it is; here they run, as it has none in their folder."""
    names = sorted(ablation.OF_SEVERAL_TASKS)
    runs_of = {name: tmp_path / str(index) for index, name in enumerate([ablation.BASE, *names])}
    assert set(names) < set(ablation.variants("rules"))
    run_apart(ablation, [("rules", name, ("dwell-flips",), (0,), 0.2, folder) for name, folder in runs_of.items()])
    runs = {name: json.loads(next(folder.rglob("*.json")).read_text())["runs"] for name, folder in runs_of.items()}
    assert runs[ablation.BASE]["ours"]["figures"]["plan_changes_per_hour"] > 0
    assert all(runs[name]["ours"] == runs[ablation.BASE]["ours"] for name in names)


def test_groups_hold_every_constant_once(ablation: Any) -> None:
    names = [name for group in ablation.GROUPS.values() for name in group]
    assert sorted((*names, *LEFT_OUT)) == sorted(Tuning.__slots__)
