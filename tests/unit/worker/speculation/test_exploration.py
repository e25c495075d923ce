"""Tests of exploration: its share of the time, the depth limit of the plan, and the order of shapes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import Plan, PlanRow, TreeShape
from specdecode_worker.control.plan import (
    BURST_STEPS,
    EXPECTED_LOSS,
    MIN_STEPS,
    MIN_WINDOWS,
    WINDOW_STEPS,
    Burst,
    BurstAllocation,
    ChangeDetector,
    Exploration,
    TimeBudget,
    changed_loads,
)

CHAIN = TreeShape.chain
SECONDS = {0: 0.010, 1: 0.011, 2: 0.012, 3: 0.014, 4: 0.017, 5: 0.030}
RUNNING = CHAIN(2)
PERIOD = 4000
"""Steps in which bursts are counted; exploration has full pace during the first quarter of the first period."""


def cost(depth: int) -> tuple[float, float]:
    """Return the duration in seconds and the tokens per sequence of a step of this depth."""
    return SECONDS.get(depth, 0.03), 1 + 0.5 * depth if depth <= 2 else 2.0


def run(
    steps: int, share: float, running: TreeShape = RUNNING, max_depth: int = 5
) -> tuple[Exploration, list[Burst], float]:
    """Simulate ``steps`` steps with exploration.

    Returns:
        The exploration state, its bursts, and the share of all seconds lost by bursts, without the worst loss of one
        burst.
    """
    account, bursts, lost, total = Exploration(), [], 0.0, 0.0
    baseline = cost(running.depth)[0] / cost(running.depth)[1]
    for _ in range(steps):
        burst = account.burst_for(1, running, running, max_depth, share)
        if burst is not None:
            burst.done += 1
            if not bursts or bursts[-1] is not burst:
                bursts.append(burst)
        seconds, tokens = cost((burst.shape if burst else running).depth)
        lost += max(seconds - tokens * baseline, 0) if burst else 0
        total += seconds
        account.passed(1, seconds, tokens, explores=burst is not None, shape=burst.shape if burst else running)
    return account, bursts, (lost - BURST_STEPS * max(SECONDS.values())) / total


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_bursts_lose_no_more_than_half_the_share_and_one_burst(share: float) -> None:
    _, bursts, lost = run(20_000, share)
    assert bursts
    assert lost <= share / 2


def test_zero_share_allows_no_exploration() -> None:
    account, bursts, _ = run(500, 0.0)
    assert not bursts
    assert not account.shadows(0.0)


def test_no_burst_before_the_baseline_is_known() -> None:
    assert not run(MIN_STEPS, 0.5)[1]
    assert run(MIN_STEPS + 1, 0.5)[1]


def test_a_burst_lasts_its_steps_and_is_one_shape() -> None:
    bursts = run(2_000, 0.5)[1]
    assert all(burst.done == BURST_STEPS for burst in bursts[:-1])
    assert all(burst.shape != RUNNING for burst in bursts)


def test_bursts_run_neighbours_first_and_often_and_every_shape_now_and_then() -> None:
    shapes = [burst.shape.depth for burst in run(20_000, 0.5)[1]]
    assert set(shapes[:3]) == {0, 1, 3}, "plain steps show whether the drafts became slower or the machine"
    assert set(shapes) == {0, 1, 3, 5}
    assert min(shapes.count(1), shapes.count(3)) > 2 * max(shapes.count(0), shapes.count(5))
    last = shapes[-len(shapes) // 3 :]
    assert set(last) == {0, 1, 3, 5}


@given(st.integers(0, 12), st.integers(0, 8))
def test_no_burst_runs_deeper_than_the_plan_allows(running: int, max_depth: int) -> None:
    bursts = run(400, 0.5, CHAIN(running), max_depth)[1]
    assert all(burst.shape.depth <= max_depth for burst in bursts)
    assert bool(bursts) == (max_depth > 0)


@pytest.mark.parametrize(("deepest", "goes_on"), [(5, True), (4, False), (0, False)])
def test_a_new_plan_ends_a_burst_that_it_forbids(deepest: int, goes_on: bool) -> None:
    account = run(MIN_STEPS, 0.5)[0]
    account.burst = Burst(CHAIN(5), done=3)
    assert (account.burst_for(1, RUNNING, RUNNING, deepest, 0.0) is not None) is goes_on


def test_time_in_which_nothing_may_be_explored_does_not_count() -> None:
    account = Exploration()
    for max_depth, share in ((5, 0.0), (0, 0.5)):
        account.burst_for(1, CHAIN(0), CHAIN(0), max_depth, share)
        account.passed(1, 100.0, 100.0, explores=False, steps=MIN_STEPS)
        account.passed(1, 9.0, 1.0, explores=True)
        account.passed(1, 1.0, 1.0, explores=False)
    assert (account.counted_seconds, account.bursts.spent_seconds) == (0, 0), "nor does the loss of the guard's probes"
    account.burst_for(1, RUNNING, RUNNING, 5, 0.5)
    account.passed(1, 1.0, 1.0, explores=False)
    assert account.counted_seconds == 1


def test_each_load_has_its_own_baseline() -> None:
    account = Exploration()
    for _ in range(3 * MIN_STEPS + 5):
        account.passed(0, 0.01, 1.0, explores=False)
    assert account.burst_for(1, RUNNING, RUNNING, 5, 0.5) is None, "nothing is known of this load"
    assert account.burst_for(0, RUNNING, RUNNING, 5, 0.5) is not None


def test_shadow_passes_stop_when_half_of_the_share_is_spent() -> None:
    account = Exploration()
    assert not account.shadows(0.1), "nothing has been earned yet"
    account.passed(1, 10.0, 1.0, explores=False)
    assert account.shadows(0.1)
    assert not account.shadows(0.1), "the next step stays as the plan has it"
    account.shadow.pay(0.49)
    assert account.shadows(0.1)
    account.shadow.pay(0.02)
    assert [account.shadows(0.1) for _ in range(3)] == [False] * 3


def test_shadow_time_is_charged_and_excluded_from_the_baseline() -> None:
    account = Exploration()
    for _ in range(MIN_STEPS):
        account.passed(0, 0.014, 1.0, explores=False, shadow_seconds=0.004)
    assert account.shadow.spent_seconds == pytest.approx(0.004 * MIN_STEPS)
    account.passed(0, 0.03, 1.0, explores=True)
    account.passed(0, 0.01, 1.0, explores=False)
    assert account.bursts.spent_seconds == pytest.approx(0.03 - 0.01)


def test_a_burst_pays_for_what_all_of_its_steps_lose_together() -> None:
    """Steps of the same shape yield one token or three. Each alone loses or gains; together they cost nothing."""
    account = Exploration()
    for tokens in (1.0, 3.0) * MIN_STEPS:
        account.passed(0, 0.02, tokens, explores=False)
    usual = account._loads[0].baseline.seconds
    assert usual == pytest.approx(0.01, rel=0.05)
    for tokens in (1.0, 3.0) * (BURST_STEPS // 2):
        account.passed(0, 0.02, tokens, explores=True, shape=CHAIN(3))
    assert account.bursts.spent_seconds == 0.0, "the burst may go on"
    account.passed(0, 0.02, 2.0, explores=False)
    assert account.bursts.spent_seconds == pytest.approx(0.0, abs=0.02)


def test_exploration_that_wins_does_not_crowd_out_the_plan() -> None:
    _, bursts, _ = run(1000, 0.5, running=CHAIN(0))
    assert cost(2)[0] / cost(2)[1] < cost(0)[0] / cost(0)[1], "bursts of chain:2 cost nothing here"
    assert 2 < len(bursts) <= 1000 / (2 * BURST_STEPS) + 1


def allocated(losses: dict[int, tuple[float, float]], bursts: int, near: set[int]) -> Counter[int]:
    """Return the number of bursts by depth. ``losses`` are means and standard deviations of one burst's loss."""
    allocation, numbers, counts = BurstAllocation(), random.Random(0), Counter[int]()
    shapes = [CHAIN(depth) for depth in sorted(losses)]
    for _ in range(bursts):
        shape = allocation.next(shapes, [CHAIN(depth) for depth in near])
        allocation.add(shape, numbers.gauss(*losses[shape.depth]))
        counts[shape.depth] += 1
    return counts


def test_bursts_follow_variance_over_squared_loss() -> None:
    counts = allocated({0: (0.6, 0.1), 1: (0.1, 0.1), 3: (0.2, 0.1), 7: (1.0, 0.1)}, 400, near={1, 3})
    assert counts[1] / counts[3] == pytest.approx(4, rel=0.5), "variance / loss^2"
    assert counts[0] < counts[3] / 2
    assert min(counts.values()) >= 0.02 * 400


def test_a_noisier_shape_gets_more_bursts() -> None:
    counts = allocated({1: (0.2, 0.3), 3: (0.2, 0.1)}, 600, near={1, 3})
    assert counts[1] > 3 * counts[3]


def test_a_far_shape_that_turns_out_to_be_close_gets_as_many_bursts_as_a_neighbour() -> None:
    counts = allocated({1: (0.1, 0.1), 3: (0.1, 0.1), 7: (0.0, 0.1)}, 400, near={1, 3})
    assert counts[7] > max(counts[1], counts[3])


def test_bursts_that_are_never_measured_do_not_hold_up_the_others() -> None:
    allocation = BurstAllocation()
    begun = {allocation.next([CHAIN(0), CHAIN(2), CHAIN(4)], [CHAIN(2), CHAIN(4)]).depth for _ in range(60)}
    assert begun == {0, 2, 4}


@pytest.mark.parametrize(("shapes", "steps", "is_known"), [([3], 16, True), ([3, 4], 16, False), ([3], 4, False)])
def test_only_a_burst_of_one_shape_says_what_the_shape_loses(shapes: list[int], steps: int, is_known: bool) -> None:
    account = Exploration()
    for _ in range(MIN_STEPS):
        account.passed(0, 0.01, 1.0, explores=False)
    for step in range(steps):
        account.passed(0, 0.02, 1.0, explores=True, shape=CHAIN(shapes[step % len(shapes)]))
    account.passed(0, 0.01, 1.0, explores=False)
    losses = account._loads[0].allocation._losses
    assert {shape.depth: loss._mean for shape, loss in losses.items()} == (
        {3: pytest.approx(log(2))} if is_known else {}
    )


def test_a_change_outdates_what_shapes_lost_at_that_load() -> None:
    account = run(20_000, 0.5)[0]
    account.restart({0})
    assert account._loads[1].allocation._losses
    account.restart({1})
    assert not account._loads[1].allocation._losses


def test_a_burst_that_a_new_plan_interrupts_says_nothing_of_its_shape() -> None:
    account = run(MIN_STEPS, 0.5)[0]
    for _ in range(BURST_STEPS):
        account.passed(1, 0.02, 1.0, explores=True, shape=CHAIN(3))
    account.restart({0, 1})
    account.passed(1, 0.02, 1.0, explores=True, shape=CHAIN(3))
    account.passed(1, 0.012, 2.0, explores=False, shape=RUNNING)
    assert not account._loads[1].allocation._losses
    assert account.bursts.spent_seconds > 0


@given(st.lists(st.floats(-1, 1), max_size=20))
def test_gains_add_no_budget(payments: list[float]) -> None:
    budget = TimeBudget()
    for seconds in payments:
        before = budget.spent_seconds
        budget.pay(seconds)
        assert budget.spent_seconds == before + max(seconds, 0)


def test_burst_waits_until_its_expected_loss_is_affordable() -> None:
    """Half of the share must cover the loss of a whole burst, so a worker that has just started does not explore."""
    account, share, steps = Exploration(), 0.1, 0
    while account.burst_for(0, RUNNING, RUNNING, 5, share) is None:
        account.passed(0, 0.01, 1.0, explores=False)
        steps += 1
    assert steps == pytest.approx(EXPECTED_LOSS * BURST_STEPS / (share / 2), abs=1)


def bursts_in(account: Exploration, steps: int, running: TreeShape = RUNNING, tokens: float = 2.0) -> int:
    """Return the number of bursts that 5 % pay within ``steps`` steps; a burst doubles the time per token."""
    count = 0
    for _ in range(steps):
        burst = account.burst_for(1, running, running, 5, 0.05)
        if burst is not None:
            count += not burst.done
            burst.done += 1
        account.passed(1, 0.02, tokens / 2 if burst else tokens, explores=burst is not None)
    return count


def test_plain_decoding_is_explored_at_full_pace_as_it_shows_nothing_of_the_draft() -> None:
    account = Exploration()
    first, *_, last = [bursts_in(account, PERIOD, CHAIN(0)) for _ in range(16)]
    assert last >= first - 1


@pytest.mark.parametrize("tokens", [1.7, 2.4])
def test_exploration_diminishes_until_the_tokens_per_step_change(tokens: float) -> None:
    account = Exploration()
    first, *_, last = [bursts_in(account, PERIOD) for _ in range(16)]
    assert bursts_in(account, PERIOD, tokens=tokens) >= first - 2 > 2 * last


def test_a_new_plan_restarts_exploration_at_the_loads_that_it_changes() -> None:
    account = Exploration()
    first, *_, last = [bursts_in(account, PERIOD) for _ in range(16)]
    account.restart({0, 2})
    assert bursts_in(account, PERIOD) <= last + 1
    account.restart({1})
    assert bursts_in(account, PERIOD) >= first - 1
    bursts_in(account, 15 * PERIOD)
    account.restart()
    assert bursts_in(account, PERIOD) >= first - 1


def test_loads_that_a_plan_changes() -> None:
    def plan(*depths: int, version: int = 1, initial: int = 3) -> Plan:
        rows = (PlanRow(concurrency=load, context=0, shape=CHAIN(depth)) for load, depth in enumerate(depths))
        return Plan(version=version, rows=tuple(rows), initial=CHAIN(initial))

    assert changed_loads(plan(1, 2, 3), plan(1, 2, 3, version=2)) == set()
    assert changed_loads(plan(1, 2, 3), plan(1, 4, 3, version=2)) == {1}
    assert changed_loads(plan(1, 2), plan(1, 2, 3)) == {2}
    assert changed_loads(plan(1), plan(1, initial=4)) == set(range(6))
    deeper = plan(1).model_copy(update={"max_depth": 8})
    assert changed_loads(plan(1), deeper) == set(range(6)), "deeper chains were never explored"


def windows(mean: float, count: int, seed: int = 0) -> Iterator[float]:
    """Yield the tokens of windows of steps; their standard deviation is 0.1 a step."""
    numbers = random.Random(seed)
    yield from (WINDOW_STEPS * numbers.gauss(mean, 0.1) for _ in range(count))


def test_noise_is_rarely_a_change() -> None:
    alarms = 0
    detector = ChangeDetector()
    for tokens in windows(2.0, 20_000):
        if detector.add(tokens, WINDOW_STEPS):
            alarms, detector = alarms + 1, ChangeDetector()
    assert alarms <= 5


@pytest.mark.parametrize(("mean", "most"), [(1.0, 4), (3.0, 4), (1.6, 8), (2.4, 8), (1.75, 40)])
def test_windows_until_a_shift_is_detected(mean: float, most: int) -> None:
    for seed in range(20):
        detector = ChangeDetector()
        assert not any(detector.add(tokens, WINDOW_STEPS) for tokens in windows(2.0, 2 * MIN_WINDOWS, seed))
        assert any(detector.add(tokens, WINDOW_STEPS) for tokens in windows(mean, most, seed + 100))


def test_one_unusual_window_is_no_change() -> None:
    detector = ChangeDetector()
    series = [*windows(2.0, 20), WINDOW_STEPS * 8.0, *windows(2.0, 20, seed=1)]
    assert not any(detector.add(tokens, WINDOW_STEPS) for tokens in series)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 1000)), max_size=200))
def test_any_steps_can_be_added(steps: list[tuple[float, int]]) -> None:
    detector = ChangeDetector()
    for tokens, count in steps:
        assert detector.add(tokens, count) in (True, False)
