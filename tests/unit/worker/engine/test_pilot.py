"""The pilot: what it tells the guard of steps that ran with fewer sequences than their bucket holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from specdecode_worker.contract import Plan, TreeShape
from specdecode_worker.engine.pilot import Pilot
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
