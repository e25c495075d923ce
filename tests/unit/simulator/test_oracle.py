"""The oracles: the joint choice is the best of all, and nobody beats it by more than noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from specdecode_operator.api.v1alpha1 import STABILITY, TreeSpec
from specdecode_simulator.policies.oracle import Constrained, Part, Shapes, Text
from specdecode_simulator.records.acceptance_walks import chain, form_of
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.scoring.run import run_trace
from specdecode_simulator.traces.catalogue import named
from specdecode_simulator.world.fleet import Fleet
from specdecode_worker.contract import TreeShape
from support.small_simulation import table_of

CODE, PROSE = Part(6.0, (Text("code", 0.5),)), Part(9.0, (Text("prose", -0.2),))
CHAINS_ONLY, NARROW = TreeSpec(topK=1), TreeSpec(topK=2, maxNodes=4)


@pytest.mark.parametrize("token_seconds", [0.00002, 0.0003, 0.001, 0.003])
def test_the_joint_choice_is_the_best_of_all_chains(library: Library, token_seconds: float) -> None:
    shapes = Shapes(library.records, table_of(token_seconds, 0.002), CHAINS_ONLY)
    found = shapes.best((CODE, PROSE), 3000.0)
    everything = (tuple(map(chain, depths)) for depths in product(range(8), repeat=2))
    best = max(shapes.pace((CODE, PROSE), forms, 3000.0) for forms in everything)
    assert shapes.pace((CODE, PROSE), found, 3000.0) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("pass_seconds", [0.0002, 0.002, 0.01])
@pytest.mark.parametrize("token_seconds", [0.00002, 0.0003, 0.003])
def test_no_tree_within_the_bounds_is_better_by_more_than_a_thousandth(
    library: Library, token_seconds: float, pass_seconds: float
) -> None:
    shapes = Shapes(library.records, table_of(token_seconds, pass_seconds), NARROW, deepest=3)
    parts = (CODE,)
    found = shapes.best(parts, 3000.0)
    best = max(shapes.pace(parts, (form_of(tree.parents),), 3000.0) for tree in all_trees(4, 3, 2))
    assert shapes.pace(parts, found, 3000.0) >= best / 1.001


def all_trees(nodes: int, depth: int, top_k: int) -> Iterator[TreeShape]:
    """Yield all trees within the bounds, each once, in breadth-first order."""
    for count in range(nodes + 1):
        for parents in product(*(range(node + 1) for node in range(count))):
            if list(parents) == sorted(parents):
                tree = TreeShape(parents)
                if tree.depth <= depth and max(tree.ranks) < top_k:
                    yield tree


def test_dear_tokens_go_to_those_that_accept_more(library: Library) -> None:
    code, prose = Shapes(library.records, table_of(0.0006, 0.0005), CHAINS_ONLY).best((CODE, PROSE), 3000.0)
    assert code.nodes > prose.nodes


def test_trees_are_wider_where_verified_tokens_cost_nothing(library: Library) -> None:
    cheap, dear = (
        Shapes(library.records, table_of(token_seconds, 0.002), TreeSpec()).best((CODE,), 3000.0)[0]
        for token_seconds in (0.00002, 0.003)
    )
    assert cheap.nodes > cheap.depth
    assert dear.nodes < cheap.nodes


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
