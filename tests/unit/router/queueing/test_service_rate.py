"""Tests of the service rate behind Retry-After."""

from __future__ import annotations

from specdecode_router.queueing.service_rate import MAX_RETRY_SECONDS, ServiceRate


def observed(per_second: float, seconds: float, *, start: float = 0.0) -> ServiceRate:
    rate = ServiceRate(start)
    rate.set_busy(start, True)
    for index in range(int(seconds * per_second)):
        rate.add_departure(start + (index + 1) / per_second)
    return rate


def test_retry_after_is_the_time_until_all_have_left() -> None:
    assert 19 <= observed(4, 60).retry_seconds(80, 60) <= 21
    assert 39 <= observed(4, 60).retry_seconds(80, 60, share=0.5) <= 41


def test_retry_after_has_bounds() -> None:
    assert observed(4, 60).retry_seconds(1, 60) == 1
    assert observed(0.1, 60).retry_seconds(1000, 60) == MAX_RETRY_SECONDS
    assert ServiceRate(0).retry_seconds(1, 5) == MAX_RETRY_SECONDS


def test_idle_time_does_not_slow_the_rate_down() -> None:
    rate = observed(4, 60)
    rate.set_busy(60, False)
    rate.add_departure(500)
    assert rate.retry_seconds(80, 3600) <= 21


def test_recent_departures_count_more() -> None:
    rate = observed(4, 60)
    for second in range(60, 180):
        rate.add_departure(second)
    assert rate.retry_seconds(20, 180) > 15


def test_no_departure_for_long_raises_retry_after() -> None:
    assert observed(4, 60).retry_seconds(20, 240) > 10 * observed(4, 60).retry_seconds(20, 60) / 5
