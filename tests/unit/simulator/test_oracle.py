"""The oracles: the joint choice is the best of all, and nobody beats it by more than noise."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from specdecode_operator.api.v1alpha1 import STABILITY
from specdecode_simulator.policies.oracle import Constrained, Part, best_depths
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.records.step_times import StepTable
from specdecode_simulator.scoring.run import run_trace
from specdecode_simulator.traces.catalogue import named
from specdecode_simulator.world.fleet import Fleet
from support.small_simulation import table_of

CODE = Part(6.0, (0.0, 0.85, 1.55, 2.1, 2.5, 2.8, 3.0, 3.1))
PROSE = Part(9.0, (0.0, 0.4, 0.55, 0.6, 0.62, 0.63, 0.63, 0.63))


def pace(table: StepTable, parts: list[Part], depths: tuple[int, ...]) -> float:
    sequences = sum(part.sequences for part in parts)
    verify = sum(part.sequences * (depth + 1) for part, depth in zip(parts, depths, strict=True))
    tokens = sum(part.sequences * (1 + part.tokens[depth]) for part, depth in zip(parts, depths, strict=True))
    return tokens / table.seconds(sequences, verify, max(depths), 3000.0)


@pytest.mark.parametrize("token_seconds", [0.00002, 0.0003, 0.001, 0.003])
def test_the_joint_choice_is_the_best_of_all(token_seconds: float) -> None:
    table, parts = table_of(token_seconds, 0.002), [CODE, PROSE]
    found = best_depths(table, parts, 3000.0)
    best = max(pace(table, parts, depths) for depths in product(range(8), repeat=2))
    assert pace(table, parts, found) == pytest.approx(best, rel=1e-9)


def test_dear_tokens_go_to_those_that_accept_more() -> None:
    code, prose = best_depths(table_of(0.0006, 0.0005), [CODE, PROSE], 3000.0)
    assert code > prose


@pytest.mark.parametrize("name", ["steady-cpu-full", "load-swings", "task-mix"])
def test_no_fixed_depth_beats_the_oracles_by_more_than_noise(name: str, library: Library) -> None:
    fixed = [f"fixed-{depth}" for depth in range(4)]
    runs = dict(run_trace(name, 0.2, 3, [*fixed, "clairvoyant", "constrained"], library, {}))
    seconds = {policy: run.figures.time_per_token for policy, run in runs.items()}
    best = min(seconds[policy] for policy in fixed)
    assert seconds["clairvoyant"] < 1.02 * best
    assert seconds["constrained"] < 1.05 * best


def test_the_constrained_oracle_keeps_to_the_limits(library: Library) -> None:
    trace = named("dwell-flips", 0.25)
    free = {"min_dwell_seconds": 0, "min_gain_percent": 0, "max_changes_per_hour": 3600}

    def versions(**limits: float) -> int:
        oracle = Constrained(trace, library, limits=replace(STABILITY["Medium"], **{**free, **limits}))
        Fleet(trace, library, 0).run(oracle)
        return oracle.versions

    eager = versions()
    assert versions(min_dwell_seconds=600) < eager / 2
    assert versions(min_gain_percent=100) < eager / 2
    assert versions(max_changes_per_hour=1) < eager / 2
