"""The modelled half of the worker against the worker's own code, step by step."""

from __future__ import annotations

import random

import pytest
import torch
from small_llama import engine_of, networks

from specdecode_operator.simulate.guard import Guard, Pace
from specdecode_operator.simulate.pilot import Exploration, PlanPilot
from specdecode_operator.simulate.segment import Group, Load
from specdecode_operator.simulate.walks import chain
from specdecode_worker.contract import Buckets, Plan, PlanRow, TreeShape
from specdecode_worker.speculation.dispatch import Dispatcher
from specdecode_worker.speculation.exploration import Exploration as RealExploration
from specdecode_worker.speculation.guard import Guard as RealGuard
from specdecode_worker.speculation.guard import TimePerToken as RealPace
from specdecode_worker.speculation.plain_step_times import PlainStepTimes


def test_many_steps_at_once_move_a_pace_as_one_after_the_other() -> None:
    one, other = Pace(), RealPace()
    for steps in (10, 20, 3):
        one.add(steps, 0.05 * steps, 1.5 * steps)
        for _ in range(steps):
            other.add(0.05, 1.5)
    one.add(5, 0.9, 5.0)
    for _ in range(5):
        other.add(0.18, 1.0)
    assert one.pace == pytest.approx(other.seconds)


@pytest.mark.parametrize("seed", range(3))
def test_the_guard_says_what_the_workers_guard_says(seed: int) -> None:
    coins, modelled, real = random.Random(seed), Guard(), RealGuard()
    cell, verdicts = (0, 0), []
    modelled.assume(cell, 0.05)
    real.assume(0, 0, 0.05)
    for step in range(9000):
        wins = (step // 3000) % 2
        is_plain = coins.random() < 0.2
        allowed = modelled.allows(cell, chain(3))
        assert allowed == real.allows(0, 0, TreeShape.chain(3)), step
        verdicts.append(allowed)
        depth = 0 if is_plain or not allowed else 3
        seconds = (0.05 if depth == 0 else 0.06) * coins.uniform(0.95, 1.05)
        tokens = 1.0 if depth == 0 else (2.0 if wins else 1.0)
        modelled.measured(cell, chain(depth), 1, seconds, tokens)
        real.record_step(0, 0, TreeShape.chain(depth), seconds, tokens)
    assert True in verdicts
    assert False in verdicts


def test_all_read_the_rows_of_the_longest_context() -> None:
    rows = tuple(PlanRow(concurrency=1, context=bucket, shape=TreeShape.chain(1 + bucket)) for bucket in range(2))
    plan = Plan(rows=rows, explore=0.0, guard=False, buckets=Buckets(concurrency=(1,), context=(100,)))
    pilot = PlanPilot(("other",), plan, lambda running: 0.0)
    short, long = Group(0, 0, 0), Group(0, 1, 0)
    forms = pilot.next(Load(0.0, 0, 2, {short: 1, long: 1}, 200.0)).forms
    assert {group: form.depth for group, form in forms.items()} == {short: 2, long: 2}


def test_a_segment_ends_where_the_guard_may_change_its_mind() -> None:
    guard = Guard()
    guard.allows((0, 0), chain(2))
    for form, seconds in ((chain(0), 0.02), (chain(2), 0.06)):
        guard.measured((0, 0), form, 30, 30 * seconds, 30.0)
    assert not guard.allows((0, 0), chain(2))
    left = 0
    while not guard.allows((0, 0), chain(2)):
        steps = guard.until_verdict((0, 0))
        guard.measured((0, 0), chain(0), steps, steps * 0.02, float(steps))
        left += steps
    assert left == 4 * 2 / 0.005, "a probe loses twice its four steps, and half a percent of those between"


def test_bursts_take_the_share_that_the_workers_exploration_takes() -> None:
    """Plain steps are free here, a deeper shape costs half as much again: both find the same shapes and spend alike."""
    cost = {depth: 0.02 * (1 + 0.5 * abs(depth - 2)) for depth in range(6)}
    modelled, real = Exploration(), RealExploration()
    counts = {"modelled": [0] * 6, "real": [0] * 6}
    left = 0
    for _ in range(30_000):
        if left == 0:
            depth = modelled.burst(0, 2, 2, 5, 0.05)
            left = 16 if depth is not None else 0
            burst_depth = depth
        running = burst_depth if left and burst_depth is not None else 2
        modelled.passed(0, 1, cost[running], 1.0, explores=left > 0)
        counts["modelled"][running] += 1
        left = max(0, left - 1)
        burst = real.burst_for(0, TreeShape.chain(2), TreeShape.chain(2), 5, 0.05)
        running = burst.shape.depth if burst else 2
        if burst:
            burst.done += 1
        real.passed(0, cost[running], 1.0, explores=burst is not None)
        counts["real"][running] += 1
    assert counts["modelled"] == pytest.approx(counts["real"], rel=0.05, abs=64)


def test_buckets_are_entered_and_left_as_the_worker_does() -> None:
    plan = Plan(uid="u", buckets=Buckets(concurrency=(1, 2, 4, 8)))
    pilot, real, coins = PlanPilot(("other",), plan, lambda running: 0.0), Dispatcher("u", "d", plan), random.Random(0)
    running = 1
    for _ in range(500):
        running = max(1, min(14, running + coins.choice((-2, -1, 0, 1, 2))))
        assert pilot._concurrency(running) == real.load(running)


@pytest.mark.parametrize("edges", [(1, 2, 4, 8), (1, 2), (2, 4)])
@pytest.mark.parametrize(("deepest", "explore"), [(5, 0.01), (1, 0.01), (5, 0.0), (0, 0.01)])
def test_what_is_timed_before_anybody_is_served_is_what_the_engine_times(
    edges: tuple[int, ...], deepest: int, explore: float
) -> None:
    plan = Plan(uid="u", version=1, buckets=Buckets(concurrency=edges), max_depth=deepest, explore=explore)
    engine = engine_of(networks(torch.float32), max_num_seqs=4)
    engine.set_plan(plan)
    timed = [
        (count, depth)
        for count in engine.calibration_loads()
        for depth in sorted({0, *(shape.depth for shape in engine.calibration_shapes())})
    ]
    assert list(PlanPilot(("other",), plan, lambda running: 0.0).calibration(4)) == timed


def test_an_older_plan_is_not_taken() -> None:
    pilot = PlanPilot(("other",), Plan(uid="u", version=3, initial=TreeShape.chain(2)), lambda running: 0.0)
    pilot.take(Plan(uid="u", version=2, initial=TreeShape.chain(5)))
    assert pilot.state.version == 3


def test_steps_are_told_as_if_their_bucket_were_full() -> None:
    plan, real = Plan(uid="u", buckets=Buckets(concurrency=(1, 2, 4, 8, 16))), PlainStepTimes()
    pilot = PlanPilot(("other",), plan, lambda running: 0.0)
    pilot.calibrate(lambda count: 0.01 + 0.003 * count**0.8, 12)
    for count in (1, 2, 4, 8, 12):
        real.learn(count, 0.01 + 0.003 * count**0.8)
    for sequences, bucket, edge in ((3, 2, 4), (4, 2, 4), (11, 4, 16), (1, 0, 1)):
        assert pilot._full(sequences, bucket) == pytest.approx(real.scaled(1.0, sequences, edge))
