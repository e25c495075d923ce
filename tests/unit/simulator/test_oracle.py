"""The oracles: the joint choice is the best of all, and nobody beats it by more than noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from specdecode_operator.api.v1alpha1 import STABILITY, TreeSpec
from specdecode_simulator.policies.oracle import Constrained, Part, Shapes, Text
from specdecode_simulator.records.acceptance_walks import chain, form_of
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.scoring.run import run_trace
from specdecode_simulator.traces.catalogue import named
from specdecode_simulator.world.fleet import Fleet
from specdecode_simulator.world.guard_schedule import steps_until_decision
from specdecode_simulator.world.plan_pilot import SHADOW_STEPS, PlanPilot
from specdecode_simulator.world.segment import Group, Load, Outcome
from specdecode_worker.contract import Buckets, Plan, PlanRow, TreeShape
from specdecode_worker.control.plan import BURST_STEPS, FULL_PACE_STEPS, Exploration, Guard, TimePerToken
from support.small_llama import engine_of, networks
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


@pytest.mark.parametrize("name", ["steady-cpu-full", "load-swings", pytest.param("task-mix", marks=pytest.mark.slow)])
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
        assert oracle.versions == 0, "the first plan is no change"
        Fleet(trace, library, 0).run(oracle)
        return oracle.versions

    eager = versions()
    assert versions(min_dwell_seconds=600) < eager / 2
    assert versions(min_gain_percent=100) < eager / 2
    assert versions(max_changes_per_hour=1) < eager / 2


# The worker's guard, dispatcher and exploration in segments of steps, compared with the same code step by step.


def test_many_steps_at_once_count_as_one_after_the_other() -> None:
    once, stepwise = TimePerToken(), TimePerToken()
    for steps in (10, 20, 3):
        once.add(0.05 * steps, 1.5 * steps, steps)
        for _ in range(steps):
            stepwise.add(0.05, 1.5)
    assert once.steps == stepwise.steps
    assert once.seconds == pytest.approx(stepwise.seconds)


@pytest.mark.parametrize(("slowed", "ratio"), [(1, 1.053), (1, 1.203), (1, 1.607), (1, 3.013), (1.4, 0.853)])
def test_guard_decides_at_the_same_step_in_segments_and_step_by_step(slowed: float, ratio: float) -> None:
    """Speculation loses by ``ratio``, then wins: stop, confirmation, probes and resumption come at the same steps.

    On a machine that became slower by ``slowed``, a stop is not confirmed.
    """
    shape, plain = TreeShape.chain(3), TreeShape(())
    allowed = {}
    for most in (1, 48):
        guard, decisions = Guard(), []
        guard.assume(0, 0, 0.05)
        while len(decisions) < 12_000:
            runs = guard.allows(0, 0, shape)
            steps = min(steps_until_decision(guard.states_at(0, 0), most), most)
            tokens = 2.0 if runs and len(decisions) > 8_000 else 1.0
            seconds = 0.05 * slowed * (ratio if runs else 1.0)
            guard.record_step(0, 0, shape if runs else plain, seconds * steps, tokens * steps, steps)
            decisions += [runs] * steps
        allowed[most] = decisions[:12_000]
    assert allowed[48] == allowed[1]
    assert 16 <= allowed[1].count(False) < 12_000


def test_all_read_the_rows_of_the_longest_context() -> None:
    rows = tuple(PlanRow(concurrency=1, context=bucket, shape=TreeShape.chain(1 + bucket)) for bucket in range(2))
    plan = Plan(rows=rows, explore=0.0, guard=False, buckets=Buckets(concurrency=(1,), context=(100,)))
    pilot = PlanPilot(("other",), plan, lambda sequences, passes: 0.0)
    short, long = Group(0, 0, 0), Group(0, 1, 0)
    forms = pilot.next(Load(0.0, 0, 2, {short: 1, long: 1}, 200.0)).forms
    assert {group: form.depth for group, form in forms.items()} == {short: 2, long: 2}


def test_bursts_in_one_segment_take_the_share_that_they_take_step_by_step() -> None:
    """The planned chain is the fastest; others cost more. Both ways run about the same shapes and spend the same."""
    plan = Plan(initial=TreeShape.chain(2), max_depth=5, explore=0.05, guard=False)
    cost = {depth: 0.02 * (1 + 0.5 * abs(depth - 2)) for depth in range(6)}
    pilot, stepwise = PlanPilot(("other",), plan, lambda sequences, passes: 0.0), Exploration()
    counts = {"segments": [0] * 6, "steps": [0] * 6}
    group = Group(0, 0, 0)
    load = Load(0.0, 0, 1, {group: 1}, 100.0)
    while sum(counts["segments"]) < 30_000:
        segment = pilot.next(load)
        depth = segment.forms[group].depth
        counts["segments"][depth] += segment.most_steps
        seconds = segment.most_steps * cost[depth]
        outcome = Outcome(segment.most_steps, seconds, 1.0, float(segment.most_steps), {})
        pilot.measured(load, segment, outcome)
    for _ in range(30_000):
        burst = stepwise.burst_for(0, TreeShape.chain(2), TreeShape.chain(2), 5, 0.05)
        depth = burst.shape.depth if burst else 2
        if burst:
            burst.done += 1
        stepwise.passed(0, cost[depth], 1.0, explores=burst is not None, shape=TreeShape.chain(depth))
        counts["steps"][depth] += 1
    assert counts["segments"] == pytest.approx(counts["steps"], rel=0.06, abs=96)


@pytest.mark.parametrize("edges", [(1, 2, 4, 8), (1, 2), (2, 4)])
@pytest.mark.parametrize(
    ("deepest", "top_k", "explore"), [(5, 4, 0.01), (5, 1, 0.01), (1, 4, 0.01), (5, 4, 0.0), (0, 4, 0.01)]
)
def test_what_is_timed_before_anybody_is_served_is_what_the_engine_times(
    edges: tuple[int, ...], deepest: int, top_k: int, explore: float
) -> None:
    plan = Plan(uid="u", version=1, buckets=Buckets(concurrency=edges), max_depth=deepest, top_k=top_k, explore=explore)
    engine = engine_of(networks(torch.float32), max_num_seqs=4)
    engine.set_plan(plan)
    shapes = (TreeShape(()), *engine.calibration_shapes())
    timed = [(count, form_of(shape.parents)) for count in engine.calibration_loads() for shape in shapes]
    assert list(PlanPilot(("other",), plan, lambda sequences, passes: 0.0).calibration(4)) == timed


def test_an_older_plan_is_not_taken() -> None:
    pilot = PlanPilot(("other",), Plan(uid="u", version=3, initial=TreeShape.chain(2)), lambda sequences, passes: 0.0)
    pilot.take(Plan(uid="u", version=2, initial=TreeShape.chain(5)))
    assert pilot.state.version == 3


def test_bursts_are_as_far_apart_in_segments_as_step_by_step() -> None:
    """With time to spare, bursts alternate with as many steps of the plan."""
    distances = []
    for steps in (1, 16):
        exploration, planned = Exploration(), TreeShape.chain(2)
        exploration.passed(0, 0.02 * 32, 32.0, explores=False, steps=32)
        for _ in range(2):
            since = 0
            while (burst := exploration.burst_for(0, planned, planned, 5, 100.0)) is None:
                exploration.passed(0, 0.02 * steps, float(steps), explores=False, steps=steps)
                since += steps
            burst.done = BURST_STEPS
            distances.append(since)
    assert distances == [0, 16, 0, 16]


def test_shadow_passes_take_their_share_of_the_time() -> None:
    plan = Plan(initial=TreeShape.chain(2), max_depth=5, explore=0.04, guard=False)
    pilot = PlanPilot(("other",), plan, lambda sequences, passes: 0.002 * passes)
    group = Group(0, 0, 0)
    load = Load(0.0, 0, 1, {group: 1}, 100.0)
    total = shadow = 0.0
    rest, steps = SHADOW_STEPS, 0
    while steps < FULL_PACE_STEPS:
        segment = pilot.next(load)
        assert not segment.shadow or rest >= SHADOW_STEPS
        rest = 0 if segment.shadow else rest + segment.most_steps
        extra = 0.002 * 3 if segment.shadow else 0.0
        seconds = segment.most_steps * (0.02 + extra)
        total, shadow = total + seconds, shadow + segment.most_steps * extra
        steps += segment.most_steps
        pilot.measured(load, segment, Outcome(segment.most_steps, seconds, 1.0, float(segment.most_steps), {}))
    assert shadow / total == pytest.approx(0.02, rel=0.05), "half of the share"
