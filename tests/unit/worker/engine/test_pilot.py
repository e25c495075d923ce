"""The pilot: what it tells the guard and the account of exploration of the steps that it picked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from specdecode_worker.contract import Buckets, Plan, PlanRow, TreeShape
from specdecode_worker.engine.shape_selector import Pilot
from specdecode_worker.speculation.dispatch import Dispatcher
from specdecode_worker.speculation.guard import LOSES

CHAIN = TreeShape.chain(2)


class Ready:
    """A draft that is always ready."""

    def __bool__(self) -> bool:
        return True

    def ready(self, request: Any) -> bool:
        return True


def of(count: int) -> list[Any]:
    return [SimpleNamespace(cached_bound=10, submit=SimpleNamespace(task="other")) for _ in range(count)]


def test_all_read_the_rows_of_the_longest_context() -> None:
    """A step is as long as the batch makes it: what a short request drafts is paid for beside the long one."""
    rows = tuple(PlanRow(concurrency=1, context=bucket, shape=TreeShape.chain(1 + bucket)) for bucket in range(2))
    plan = Plan(draft="d", rows=rows, max_depth=2, explore=0.0, buckets=Buckets(concurrency=(1,), context=(100,)))
    pilot = Pilot(Dispatcher("", "d", plan), cast("Any", Ready()))
    short, long = of(2)
    long.cached_bound = 101
    assert [tree.depth for tree in pilot.trees([short, short])] == [1, 1]
    assert [tree.depth for tree in pilot.trees([short, long])] == [2, 2]
    assert (pilot.choice.context, pilot.choice.shape) == (1, CHAIN), "the guard learns of mixed contexts too"


def test_three_that_are_faster_than_four_are_no_gain() -> None:
    """Plain steps take 10 ms and 10 more for every sequence. Requests that speculate end apart, so three run where four
    were plain: they are held against what three take plainly."""
    pilot = Pilot(Dispatcher("", "d", Plan(draft="d", initial=CHAIN, max_depth=2, explore=0.0)), cast("Any", Ready()))
    for count in (1, 2, 4):
        pilot.assume_plain(count, 0.01 + 0.01 * count)
    steps = 0
    while pilot.trees(of(3))[0].depth and steps < 1000:
        pilot.measured(pilot.choice, 1.04 * 2 * 0.04, 2.0, 0.0)
        steps += 1
    assert steps == LOSES[0][0], "4 % slower than 40 ms a token, and faster than the 50 ms of four"
    (cell,) = pilot.guard_cells()
    assert cell.plain is not None
    assert abs(cell.plain - 0.05) < 1e-9


def run(pilot: Pilot, steps: int) -> tuple[float, int]:
    """Plain steps take 10 ms, drafting ones 14 and bring nothing: (share of the time that was lost, steps drafted)."""
    lost, drafted = 0.0, 0
    for _ in range(steps):
        slower = 0.004 if pilot.trees(of(1))[0].depth else 0.0
        pilot.measured(pilot.choice, 0.01 + slower, 1.0, 0.0)
        lost, drafted = lost + slower, drafted + bool(slower)
    return lost / (0.01 * steps + lost), drafted


def test_what_probes_lose_is_paid_like_bursts() -> None:
    """Half a percent for bursts and half for probes come out of one purse, once the guard has stopped what loses."""
    plan = Plan(draft="d", initial=CHAIN, max_depth=2, explore=0.01, guard=True)
    pilot = Pilot(Dispatcher("", "d", plan), cast("Any", Ready()))
    pilot.assume_plain(1, 0.01)
    run(pilot, 500)
    lost, drafted = run(pilot, 5_000)
    assert drafted > 40
    assert lost < 0.0055, "0.007 where both have half a percent of their own"


def test_probes_are_not_the_usual_pace() -> None:
    """A burst's loss is held against what usually runs; a probe is no more usual than a burst."""
    plan = Plan(draft="d", initial=CHAIN, max_depth=2, explore=0.0, guard=True)
    pilot = Pilot(Dispatcher("", "d", plan), cast("Any", Ready()))
    pilot.assume_plain(1, 0.01)
    run(pilot, 400)
    while not pilot.trees(of(1))[0].depth:
        pilot.measured(pilot.choice, 0.01, 1.0, 0.0)
    for _ in range(8):
        assert pilot.choice.explores
        pilot.measured(pilot.choice, 0.014, 1.0, 0.0)
        pilot.trees(of(1))
    usual = pilot._exploration._usual[0].seconds
    assert usual is not None
    assert abs(usual - 0.01) < 1e-6
