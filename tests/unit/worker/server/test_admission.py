"""Tests of admission: the limit on waiting requests, and the Retry-After time of rejected requests."""

from __future__ import annotations

import pytest

from specdecode_worker.server.admission import Line
from specdecode_worker.server.errors import BadRequest, TooManyWaiting


def ended(line: Line, *times: float) -> Line:
    for now in times:
        line.ended(now)
    return line


def test_as_many_as_fit_are_let_in() -> None:
    line = Line(max_num_seqs=2, max_waiting=3)
    line.check(there=3, more=2, now=0, field="n")
    with pytest.raises(TooManyWaiting) as full:
        line.check(there=3, more=3, now=0, field="n")
    assert full.value.headers == {"Retry-After": "1"}
    with pytest.raises(BadRequest, match="at most 5"):
        line.check(there=0, more=6, now=0, field="n")


@pytest.mark.parametrize(
    ("times", "now", "leaving", "seconds"),
    [
        ((), 100, 3, 1),
        ((0,), 100, 3, 1),
        ((0, 2, 4, 6), 8, 1, 2),
        ((0, 2, 4, 6), 8, 3, 6),
        ((0, 0.1, 0.2), 0.3, 1, 1),
        ((0, 2), 40, 1, 20),
        ((0, 2), 400, 9, 60),
    ],
)
def test_the_pace_of_the_last_ones_says_when(times: tuple[float, ...], now: float, leaving: int, seconds: int) -> None:
    assert ended(Line(1, 1), *times).wait_seconds(leaving, now) == seconds
