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


def take(queue: AdmissionQueue, client: str, most: int, now: float = 0.0, in_flight: int = 0) -> int:
    """Start up to ``most`` generations of a client and return how many the queue accepted."""
    for taken in range(most):
        try:
            queue.check(in_flight + taken, 1, now, "n", client)
        except TooManyWaiting:
            return taken
        queue.record_start(client)
    return most


def test_a_lone_client_may_fill_the_queue() -> None:
    assert take(AdmissionQueue(4, 16), "flood", 30) == 20


def test_a_flooding_client_leaves_places_to_another_active_one() -> None:
    queue = AdmissionQueue(4, 16)
    assert take(queue, "quiet", 1) == 1
    flood = take(queue, "flood", 30, in_flight=1)
    assert flood == 20 // 2, "its equal share"
    assert take(queue, "quiet", 9, in_flight=1 + flood) == 9
    with pytest.raises(TooManyWaiting, match="API key") as refused:
        queue.check(11, 1, 0, "n", "flood")
    assert int(refused.value.headers["Retry-After"]) >= 1


def test_the_first_half_of_the_places_is_not_shared() -> None:
    queue = AdmissionQueue(4, 16)
    for name in "abcdefghi":
        queue.check(0, 1, 0, "n", name)
    assert take(queue, "flood", 30) == 10, "its share would be two of twenty"


def test_an_absent_client_keeps_no_share() -> None:
    queue = AdmissionQueue(4, 16)
    queue.check(0, 1, 0, "n", "gone")
    assert take(queue, "flood", 30, now=299) == 10
    assert take(queue, "flood", 30, now=301, in_flight=10) == 10


def test_a_newcomer_to_a_full_queue_gets_the_next_places() -> None:
    queue = AdmissionQueue(1, 9)
    assert take(queue, "flood", 30) == 10
    assert take(queue, "new", 1, in_flight=10) == 0
    queue.record_end(1, "flood")
    assert take(queue, "flood", 1, now=2, in_flight=9) == 0
    assert take(queue, "new", 1, now=2, in_flight=9) == 1


def test_a_client_without_places_may_exceed_its_share() -> None:
    """A request with more choices than the share would otherwise never be accepted."""
    queue = AdmissionQueue(2, 8)
    assert take(queue, "other", 4) == 4
    queue.check(4, 6, 0, "n", "many")
