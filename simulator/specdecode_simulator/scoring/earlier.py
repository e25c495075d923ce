"""Comparison of the operator with its runs of an earlier version, which `--keep` of that version wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdecode_simulator.errors import SimulatorError
from specdecode_simulator.scoring.matrix import Matrix
from specdecode_simulator.scoring.run import ANSWERED, Run
from specdecode_simulator.scoring.score import ORACLE, Interval, answered

OURS = "ours"
Pair = tuple[Mapping[str, Run], Mapping[str, Run]]
"""Runs of one trace and seed by policy: of this version, and of the earlier one."""


def compared(matrix: Matrix, runs: Mapping[str, Mapping[int, Mapping[str, Run]]], folder: Path) -> dict[str, Any]:
    """Return figures by trace, paired by seed, and the means over the traces.

    Both versions are compared with the constrained oracle of their own folder: on scaled traces it runs at the replicas
    of its version.

    Args:
        matrix: What ran.
        runs: Runs of this version, by trace, seed and policy.
        folder: Folder of the earlier runs.

    Raises:
        SimulatorError: The folder has no runs of these traces, seeds, length and interval.
    """
    traces = {}
    for trace, by_seed in runs.items():
        pairs = [(run, matrix.kept(folder, trace, seed)) for seed, run in by_seed.items()]
        whole = [pair for pair in pairs if all({OURS, ORACLE} <= each.keys() for each in pair)]
        if whole:
            traces[trace] = _compared(whole)
    if not traces:
        raise SimulatorError(f"--against: {folder} has no runs of ours and {ORACLE} with these traces, seeds and hours")
    names = ("ours", "earlier", "difference")
    means = {name: sum(figures[name]["mean"] for figures in traces.values()) / len(traces) for name in names}
    return {"traces": traces, "mean": {name: round(mean, 5) for name, mean in means.items()}}


def earlier_rows(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each trace, and one for the mean, in the order of COLUMNS."""
    for trace, figures in document["traces"].items():
        difference, changes = figures["difference"], figures["plan_changes_per_hour"]
        interval = f"{difference['low']:+.4f} to {difference['high']:+.4f}"
        answers = " against ".join(
            f"{one['within_30_s_or_1000_drafts']} of {one['steps']}" for one in figures["answers"]
        )
        ratios = (f"{figures[name]['mean']:.3f}" for name in ("ours", "earlier"))
        columns = *ratios, f"{difference['mean']:+.4f}", interval, f"{changes[0]:.1f} against {changes[1]:.1f}", answers
        yield trace, f"{figures['seeds']}", *columns
    mean = document["mean"]
    yield "mean", "", f"{mean['ours']:.4f}", f"{mean['earlier']:.4f}", f"{mean['difference']:+.4f}", "", "", ""


COLUMNS = ("trace", "seeds", "over oracle", "earlier", "difference", "95 %", "changes/h", "steps answered in time")


def _compared(pairs: Sequence[Pair]) -> dict[str, Any]:
    ratios = [(_over(ours), _over(earlier)) for ours, earlier in pairs]
    changes = [[pair[side][OURS].figures.plan_changes_per_hour for pair in pairs] for side in (0, 1)]
    return {
        "seeds": len(pairs),
        "ours": Interval.of([one for one, _ in ratios]).rounded(),
        "earlier": Interval.of([other for _, other in ratios]).rounded(),
        "difference": Interval.of([one - other for one, other in ratios]).rounded(),
        "plan_changes_per_hour": [round(sum(each) / len(each), 3) for each in changes],
        "answers": [
            answered(answers) for side in (0, 1) if (answers := _answers([pair[side][OURS] for pair in pairs]))
        ],
    }


def _over(runs: Mapping[str, Run]) -> float:
    return runs[OURS].figures.time_per_token / runs[ORACLE].figures.time_per_token


def _answers(runs: Sequence[Run]) -> list[Mapping[str, float]]:
    """Return the answers by a depth that costs least more than the best."""
    return [answer for run in runs for answer in run.answers if answer["within"] == ANSWERED[0]]
