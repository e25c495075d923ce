"""The shape selector chooses the shapes of steps and reports their cost to the guard and to the exploration budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from specdecode_worker.contract import Buckets, Plan, PlanRow, TreeShape
from specdecode_worker.control.plan import STOP_RULES, Dispatcher
from specdecode_worker.core.request import ShapeSelector

CHAIN = TreeShape.chain(2)


class Ready:
    """A draft that is always ready."""

    def __bool__(self) -> bool:
        return True

    merges = False

    def ready(self, request: Any) -> bool:
        return True

    def extension(self, request: Any) -> int:
        return 0


def of(count: int) -> list[Any]:
    return [SimpleNamespace(cached_bound=10, submit=SimpleNamespace(task="other")) for _ in range(count)]


def test_all_requests_use_the_plan_rows_of_the_longest_context() -> None:
    """All rows of a batch use the plan rows of its longest context.

    A step is as long as the batch makes it, so a short request's drafts cost as much as those of the long request.
    """
    rows = tuple(PlanRow(concurrency=1, context=bucket, shape=TreeShape.chain(1 + bucket)) for bucket in range(2))
    plan = Plan(draft="d", rows=rows, max_depth=2, explore=0.0, buckets=Buckets(concurrency=(1,), context=(100,)))
    selector = ShapeSelector(Dispatcher("", "d", plan), cast("Any", Ready()))
    short, long = of(2)
    long.cached_bound = 101
    assert [tree.depth for tree in selector.select([short, short]).trees] == [1, 1]
    mixed = selector.select([short, long])
    assert [tree.depth for tree in mixed.trees] == [2, 2]
    assert (mixed.choice.context, mixed.choice.shape) == (1, CHAIN), "the guard learns of mixed contexts too"


def test_speculation_is_compared_with_plain_steps_of_as_many_sequences() -> None:
    """Speculation on three sequences is compared with plain steps on three, not on four.

    Plain steps take 10 ms and 10 ms more for every sequence. Requests that speculate end at different times, so three
    run where four would run in plain steps.
    """
    selector = ShapeSelector(
        Dispatcher("", "d", Plan(draft="d", initial=CHAIN, max_depth=2, explore=0.0)), cast("Any", Ready())
    )
    for count in (1, 2, 4):
        selector.set_plain_step_time(count, 0.01 + 0.01 * count)
    steps = 0
    while (selection := selector.select(of(3))).trees[0].depth and steps < 1000:
        selector.record_step(selection.choice, 1.04 * 2 * 0.04, 2.0, 0.0)
        steps += 1
    assert steps == STOP_RULES[0][0], "4 % slower than 40 ms a token, and faster than the 50 ms of four"
    (cell,) = selector.guard_cells()
    assert cell.plain is not None
    assert abs(cell.plain - 0.05) < 1e-9


def run(selector: ShapeSelector, steps: int) -> tuple[float, int]:
    """Run steps and return (share of the time that was lost, number of drafting steps).

    Plain steps take 10 ms; drafting steps take 14 ms and gain nothing.
    """
    lost, drafted = 0.0, 0
    for _ in range(steps):
        selection = selector.select(of(1))
        slower = 0.004 if selection.trees[0].depth else 0.0
        selector.record_step(selection.choice, 0.01 + slower, 1.0, 0.0)
        lost, drafted = lost + slower, drafted + bool(slower)
    return lost / (0.01 * steps + lost), drafted


def test_probes_and_bursts_share_one_exploration_budget() -> None:
    """Bursts and probes share one exploration budget of half a percent, once the guard has stopped a losing shape.

    Separate budgets of half a percent each would lose 0.7 %.
    """
    plan = Plan(draft="d", initial=CHAIN, max_depth=2, explore=0.01, guard=True)
    selector = ShapeSelector(Dispatcher("", "d", plan), cast("Any", Ready()))
    selector.set_plain_step_time(1, 0.01)
    run(selector, 500)
    lost, drafted = run(selector, 5_000)
    assert drafted > 40
    assert lost < 0.0055, "0.007 where both have half a percent of their own"


def test_probes_do_not_count_towards_the_usual_step_time() -> None:
    """Probes do not count towards the usual step time.

    The loss of a burst is measured against the usual step, and a probe is as unusual as a burst.
    """
    plan = Plan(draft="d", initial=CHAIN, max_depth=2, explore=0.0, guard=True)
    selector = ShapeSelector(Dispatcher("", "d", plan), cast("Any", Ready()))
    selector.set_plain_step_time(1, 0.01)
    run(selector, 400)
    while not (selection := selector.select(of(1))).trees[0].depth:
        selector.record_step(selection.choice, 0.01, 1.0, 0.0)
    for _ in range(8):
        assert selection.choice.explores
        selector.record_step(selection.choice, 0.014, 1.0, 0.0)
        selection = selector.select(of(1))
    usual = selector._exploration._loads[0].baseline.seconds
    assert usual is not None
    assert abs(usual - 0.01) < 1e-6
