"""Tests of admission: the limit on waiting requests, and the Retry-After time of rejected requests."""

from __future__ import annotations

import pytest

from specdecode_worker.server.admission import AdmissionQueue
from specdecode_worker.server.errors import BadRequest, TooManyWaiting


def record_end(queue: AdmissionQueue, *times: float) -> AdmissionQueue:
    for now in times:
        queue.record_end(now)
    return queue


def test_requests_beyond_the_capacity_are_rejected() -> None:
    queue = AdmissionQueue(max_num_seqs=2, max_waiting=3)
    queue.check(in_flight=3, more=2, now=0, field="n")
    with pytest.raises(TooManyWaiting) as full:
        queue.check(in_flight=3, more=3, now=0, field="n")
    assert full.value.headers == {"Retry-After": "1"}
    with pytest.raises(BadRequest, match="at most 5"):
        queue.check(in_flight=0, more=6, now=0, field="n")


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
def test_retry_after_time(times: tuple[float, ...], now: float, leaving: int, seconds: int) -> None:
    assert record_end(AdmissionQueue(1, 1), *times).wait_seconds(leaving, now) == seconds
