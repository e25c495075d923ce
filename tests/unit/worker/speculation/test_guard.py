"""Tests of the guard: stops, confirmations, probes, and plans that drop a shape."""

from __future__ import annotations

import pytest

from specdecode_worker.contract import TreeShape
from specdecode_worker.speculation.guard import (
    BY_FAR,
    CHECK_STEPS,
    ENOUGH,
    LOSES,
    MOST_PATIENCE,
    PROBE_EVERY,
    PROBE_SHARE,
    PROBE_STEPS,
    Guard,
)

SOON = BY_FAR[0][0]
PLAIN, CHAIN, DEEP = TreeShape(()), TreeShape.chain(2), TreeShape.chain(4)


def run(guard: Guard, shape: TreeShape, steps: int, seconds: float, tokens: float = 1.0, cell: int = 0) -> int:
    """Return in how many of ``steps`` steps ``shape`` was allowed.

    Every other step is a plain step of one second.
    """
    ran = 0
    for _ in range(steps):
        if guard.allows(cell, 0, shape):
            guard.measured(cell, 0, shape, seconds, tokens)
            ran += 1
        else:
            guard.measured(cell, 0, PLAIN, 1.0, 1.0)
    return ran


def losing() -> Guard:
    """Return a guard with a stopped shape CHAIN."""
    guard = Guard()
    run(guard, PLAIN, ENOUGH, 1.0)
    run(guard, CHAIN, ENOUGH, 1.8, 1.5)
    return guard


def rest(guard: Guard) -> int:
    """Return the number of plain steps until CHAIN is probed."""
    steps = 0
    while not guard.allows(0, 0, CHAIN):
        guard.measured(0, 0, PLAIN, 1.0, 1.0)
        steps += 1
    return steps


def test_nothing_is_stopped_before_both_are_known() -> None:
    guard = Guard()
    assert run(guard, CHAIN, 10 * ENOUGH, 5.0) == 10 * ENOUGH
    run(guard, PLAIN, ENOUGH - 1, 1.0)
    assert guard.allows(0, 0, CHAIN)


def test_what_loses_is_stopped_and_reported_once_that_is_borne_out() -> None:
    guard = losing()
    assert not guard.allows(0, 0, CHAIN)
    (cell,) = guard.cells()
    assert (cell.suppressed, cell.plain) == (False, 1.0)
    run(guard, PLAIN, CHECK_STEPS, 1.0)
    (cell,) = guard.cells()
    assert (cell.suppressed, cell.plain) == (True, 1.0)
    assert cell.speculative == pytest.approx(1.8 / 1.5)


def test_what_loses_little_is_stopped_behind_many_steps() -> None:
    """A loss of 5 % is distinguished from noise after LOSES[0][0] steps."""
    guard = Guard()
    run(guard, PLAIN, ENOUGH, 1.0)
    assert run(guard, CHAIN, PROBE_EVERY, 1.05 * 1.5, 1.5) == LOSES[0][0]


def test_what_wins_goes_on() -> None:
    guard = Guard()
    run(guard, PLAIN, ENOUGH, 1.0)
    assert run(guard, CHAIN, 1000, 1.2, 1.5) == 1000


def test_other_loads_and_shapes_are_judged_for_themselves() -> None:
    guard = losing()
    assert guard.allows(1, 0, CHAIN)
    assert guard.allows(0, 0, DEEP)
    guard.measured(0, 0, DEEP, 1.0, 1.5)
    assert not guard.allows(0, 0, CHAIN), "two tasks of one load may run different shapes"


def test_a_stopped_shape_is_probed_and_comes_back_when_it_pays_again() -> None:
    guard = losing()
    assert rest(guard) >= PROBE_EVERY
    assert run(guard, CHAIN, PROBE_STEPS, 1.0, 1.5) == PROBE_STEPS
    assert guard.allows(0, 0, CHAIN)


def test_a_probe_that_loses_ends() -> None:
    guard = losing()
    rest(guard)
    assert run(guard, CHAIN, 2 * PROBE_STEPS, 1.6, 1.5) == PROBE_STEPS
    assert not guard.allows(0, 0, CHAIN)


def test_a_probe_that_loses_by_far_ends_early() -> None:
    guard = losing()
    rest(guard)
    assert run(guard, CHAIN, 2 * PROBE_STEPS, 2.0, 1.5) == SOON


@pytest.mark.parametrize(("seconds", "steps"), [(2.0, SOON), (2.9, SOON), (3.1, BY_FAR[1][0])])
def test_what_loses_by_far_is_stopped_early(seconds: float, steps: int) -> None:
    """A larger loss is stopped sooner. These steps emit 1.5 tokens per sequence."""
    guard = Guard()
    run(guard, PLAIN, ENOUGH, 1.0)
    assert run(guard, CHAIN, 100, seconds, 1.5) == steps


@pytest.mark.parametrize(("seconds", "lost"), [(1.65, PROBE_STEPS * 0.1), (1.8, PROBE_STEPS * 0.2), (4.5, 4 * 2)])
def test_what_loses_much_is_probed_the_later(seconds: float, lost: float) -> None:
    """A probe may lose at most PROBE_SHARE (half a percent) of the steps between probes."""
    guard = Guard()
    run(guard, PLAIN, ENOUGH, 1.0)
    run(guard, CHAIN, ENOUGH, seconds, 1.5)
    assert rest(guard) == pytest.approx(max(PROBE_EVERY, lost / PROBE_SHARE), abs=ENOUGH)


def test_probes_in_vain_come_ever_less_often_up_to_a_bound() -> None:
    guard = losing()
    steps = 100 * PROBE_EVERY
    assert run(guard, CHAIN, steps, 2.0, 1.5) <= (5 + steps / PROBE_EVERY / MOST_PATIENCE) * SOON
    assert run(guard, CHAIN, 2 * MOST_PATIENCE * PROBE_EVERY, 2.0, 1.5) >= SOON


def test_a_probe_that_wins_brings_patience_back() -> None:
    guard = losing()
    run(guard, CHAIN, 4 * PROBE_EVERY, 2.0, 1.5)
    run(guard, CHAIN, 8 * PROBE_EVERY, 1.0, 1.5)
    assert guard.allows(0, 0, CHAIN)
    while guard.allows(0, 0, CHAIN):
        run(guard, CHAIN, 1, 2.0, 1.5)
    assert run(guard, CHAIN, PROBE_EVERY + 1, 1.0, 1.5) == 1


def test_what_was_assumed_judges_until_it_is_measured() -> None:
    guard = Guard()
    guard.assume(0, 0, 1.0)
    run(guard, CHAIN, ENOUGH, 2.0, 1.5)
    assert not guard.allows(0, 0, CHAIN)
    run(guard, PLAIN, 40 * ENOUGH, 3.0)
    assert guard.cells()[0].plain == pytest.approx(3.0, rel=1e-3)
    guard.assume(0, 0, 9.0)
    assert guard.cells()[0].plain == pytest.approx(3.0, rel=1e-3)


def test_a_shape_that_the_plan_left_and_comes_back_to_is_a_new_question() -> None:
    guard = losing()
    guard.keep(lambda cell, shape: shape == CHAIN)
    assert not guard.allows(0, 0, CHAIN), "the plan still runs it"
    guard.keep(lambda cell, shape: False)
    assert guard.allows(0, 0, CHAIN)
    run(guard, CHAIN, ENOUGH, 2.0, 1.5)
    assert not guard.allows(0, 0, CHAIN), "what plain decoding costs was still known"


def test_exploration_is_not_judged() -> None:
    guard = Guard()
    run(guard, PLAIN, ENOUGH, 1.0)
    for _ in range(ENOUGH):
        guard.measured(0, 0, CHAIN, 9.0, 1.0)
    assert guard.cells() == ()
    assert guard.allows(0, 0, CHAIN)


def test_a_machine_that_became_slower_is_no_reason_to_stop() -> None:
    """Plain decoding is timed directly after the stop. It also takes twice as long now, so the stop is revoked."""
    guard = Guard()
    run(guard, PLAIN, ENOUGH, 1.0)
    run(guard, CHAIN, ENOUGH, 1.2, 1.5)
    stopped = 0
    for _ in range(10 * CHECK_STEPS):
        drafting = guard.allows(0, 0, CHAIN)
        stopped += not drafting
        guard.measured(0, 0, CHAIN if drafting else PLAIN, 2.4 if drafting else 2.0, 1.5 if drafting else 1.0)
    assert stopped == CHECK_STEPS
    assert guard.cells()[0].plain == pytest.approx(2.0)
