"""Tests of the guard: stops, confirmations, probes, and plans that drop a shape."""

from __future__ import annotations

import pytest

from specdecode_worker.contract import TreeShape
from specdecode_worker.control.plan import (
    CHECK_STEPS,
    EARLY_STOP_RULES,
    MAX_PROBE_WAIT_FACTOR,
    MIN_STEPS,
    PROBE_EVERY,
    PROBE_SHARE,
    PROBE_STEPS,
    STOP_RULES,
    Guard,
)

SOON = EARLY_STOP_RULES[0][0]
PLAIN, CHAIN, DEEP = TreeShape(()), TreeShape.chain(2), TreeShape.chain(4)


def run(guard: Guard, shape: TreeShape, steps: int, seconds: float, tokens: float = 1.0) -> int:
    """Return in how many of ``steps`` steps ``shape`` was allowed.

    Every other step is a plain step of one second.
    """
    ran = 0
    for _ in range(steps):
        if guard.allows(0, 0, shape):
            guard.record_step(0, 0, shape, seconds, tokens)
            ran += 1
        else:
            guard.record_step(0, 0, PLAIN, 1.0, 1.0)
    return ran


def losing() -> Guard:
    """Return a guard with a stopped shape CHAIN."""
    guard = Guard()
    run(guard, PLAIN, MIN_STEPS, 1.0)
    run(guard, CHAIN, MIN_STEPS, 1.8, 1.5)
    return guard


def rest(guard: Guard) -> int:
    """Return the number of plain steps until CHAIN is probed."""
    steps = 0
    while not guard.allows(0, 0, CHAIN):
        guard.record_step(0, 0, PLAIN, 1.0, 1.0)
        steps += 1
    return steps


def test_no_stop_before_both_times_are_known() -> None:
    guard = Guard()
    assert run(guard, CHAIN, 10 * MIN_STEPS, 5.0) == 10 * MIN_STEPS
    run(guard, PLAIN, MIN_STEPS - 1, 1.0)
    assert guard.allows(0, 0, CHAIN)


def test_slow_shape_is_stopped_and_reported_after_confirmation() -> None:
    guard = losing()
    assert not guard.allows(0, 0, CHAIN)
    (cell,) = guard.cells()
    assert (cell.suppressed, cell.plain) == (False, 1.0)
    run(guard, PLAIN, CHECK_STEPS, 1.0)
    (cell,) = guard.cells()
    assert (cell.suppressed, cell.plain) == (True, 1.0)
    assert cell.speculative == pytest.approx(1.8 / 1.5)


def test_loads_and_shapes_are_independent() -> None:
    guard = losing()
    assert guard.allows(1, 0, CHAIN)
    assert guard.allows(0, 0, DEEP)
    guard.record_step(0, 0, DEEP, 1.0, 1.5)
    assert not guard.allows(0, 0, CHAIN), "two tasks of one load may run different shapes"


def test_stop_is_confirmed_before_a_probe() -> None:
    """Another task's steps at this load pass the time until a probe, while no plain step confirms the stop."""
    guard = losing()
    assert run(guard, DEEP, 10 * PROBE_EVERY, 1.0, 1.5) == 10 * PROBE_EVERY
    assert not guard.allows(0, 0, CHAIN)
    assert run(guard, CHAIN, PROBE_EVERY, 1.8, 1.5) == PROBE_STEPS


@pytest.mark.parametrize(
    ("seconds", "steps", "ran"),
    [
        (1.2, 1000, 1000),
        (1.05 * 1.5, PROBE_EVERY, STOP_RULES[0][0]),  # a loss of 5 % is distinguished from noise
        (2.0, 100, SOON),
        (2.9, 100, SOON),
        (3.1, 100, EARLY_STOP_RULES[1][0]),
    ],
)
def test_larger_loss_is_stopped_sooner_and_a_faster_shape_keeps_running(seconds: float, steps: int, ran: int) -> None:
    """These steps emit 1.5 tokens per sequence."""
    guard = Guard()
    run(guard, PLAIN, MIN_STEPS, 1.0)
    assert run(guard, CHAIN, steps, seconds, 1.5) == ran


@pytest.mark.parametrize(("seconds", "lost"), [(1.65, PROBE_STEPS * 0.1), (1.8, PROBE_STEPS * 0.2), (4.5, 4 * 2)])
def test_larger_loss_waits_longer_for_a_probe(seconds: float, lost: float) -> None:
    """A probe may lose at most PROBE_SHARE (half a percent) of the steps between probes."""
    guard = Guard()
    run(guard, PLAIN, MIN_STEPS, 1.0)
    run(guard, CHAIN, MIN_STEPS, seconds, 1.5)
    assert rest(guard) == pytest.approx(max(PROBE_EVERY, lost / PROBE_SHARE), abs=MIN_STEPS)


def test_a_stalled_step_stops_a_shape_no_longer_than_failed_probes_do() -> None:
    guard = Guard()
    run(guard, PLAIN, MIN_STEPS, 1.0)
    run(guard, CHAIN, MIN_STEPS, 1.0, 1.5)
    guard.record_step(0, 0, CHAIN, 3000.0, 1.5)
    assert rest(guard) == MAX_PROBE_WAIT_FACTOR * PROBE_EVERY


def test_failed_probes_double_the_wait_up_to_a_limit() -> None:
    guard = losing()
    steps = 100 * PROBE_EVERY
    assert run(guard, CHAIN, steps, 2.0, 1.5) <= (5 + steps / PROBE_EVERY / MAX_PROBE_WAIT_FACTOR) * SOON
    assert run(guard, CHAIN, 2 * MAX_PROBE_WAIT_FACTOR * PROBE_EVERY, 2.0, 1.5) >= SOON


def test_successful_probe_resets_the_wait() -> None:
    guard = losing()
    run(guard, CHAIN, 4 * PROBE_EVERY, 2.0, 1.5)
    run(guard, CHAIN, 8 * PROBE_EVERY, 1.0, 1.5)
    assert guard.allows(0, 0, CHAIN)
    while guard.allows(0, 0, CHAIN):
        run(guard, CHAIN, 1, 2.0, 1.5)
    assert run(guard, CHAIN, PROBE_EVERY + 1, 1.0, 1.5) == 1


def test_initial_plain_time_is_used_until_measured() -> None:
    guard = Guard()
    guard.assume(0, 0, 1.0)
    run(guard, CHAIN, MIN_STEPS, 2.0, 1.5)
    assert not guard.allows(0, 0, CHAIN)
    run(guard, PLAIN, 40 * MIN_STEPS, 3.0)
    assert guard.cells()[0].plain == pytest.approx(3.0, rel=1e-3)
    guard.assume(0, 0, 9.0)
    assert guard.cells()[0].plain == pytest.approx(3.0, rel=1e-3)


def test_shape_that_is_planned_again_starts_without_history() -> None:
    guard = losing()
    guard.retain_planned(lambda cell, shape: shape == CHAIN)
    assert not guard.allows(0, 0, CHAIN), "the plan still runs it"
    guard.retain_planned(lambda cell, shape: False)
    assert guard.allows(0, 0, CHAIN)
    run(guard, CHAIN, MIN_STEPS, 2.0, 1.5)
    assert not guard.allows(0, 0, CHAIN), "what plain decoding costs was still known"


def test_exploration_steps_are_ignored() -> None:
    guard = Guard()
    run(guard, PLAIN, MIN_STEPS, 1.0)
    for _ in range(MIN_STEPS):
        guard.record_step(0, 0, CHAIN, 9.0, 1.0)
    assert guard.cells() == ()
    assert guard.allows(0, 0, CHAIN)


def test_slower_machine_does_not_stop_speculation() -> None:
    """Plain decoding is timed directly after the stop. It also takes twice as long now, so the stop is revoked."""
    guard = Guard()
    run(guard, PLAIN, MIN_STEPS, 1.0)
    run(guard, CHAIN, MIN_STEPS, 1.2, 1.5)
    stopped = 0
    for _ in range(10 * CHECK_STEPS):
        drafting = guard.allows(0, 0, CHAIN)
        stopped += not drafting
        guard.record_step(0, 0, CHAIN if drafting else PLAIN, 2.4 if drafting else 2.0, 1.5 if drafting else 1.0)
    assert stopped == CHECK_STEPS
    assert guard.cells()[0].plain == pytest.approx(2.0)
