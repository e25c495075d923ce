"""Times of cron expressions, by literals."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from specdecode_operator.drafts.drift import next_time

WEDNESDAY = datetime(2026, 11, 25, 3, 45, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * * *", "2026-11-25 03:46"),
        ("*/15 * * * *", "2026-11-25 04:00"),
        ("45 3 * * *", "2026-11-26 03:45"),
        ("46 3 * * *", "2026-11-25 03:46"),
        ("5/20 * * * *", "2026-11-25 04:05"),
        ("0 3 * * 0", "2026-11-29 03:00"),
        ("0 3 * * 7", "2026-11-29 03:00"),
        ("0 3 * * 1-5", "2026-11-26 03:00"),
        ("0 8-10/2,20 * * *", "2026-11-25 08:00"),
        ("30 4 1,15 * 5", "2026-11-27 04:30"),
        ("30 4 1,15 * *", "2026-12-01 04:30"),
        ("0 0 1 1 *", "2027-01-01 00:00"),
        ("59 23 31 12 *", "2026-12-31 23:59"),
        ("0 0 29 2 *", "2028-02-29 00:00"),
    ],
)
def test_next_time(expression: str, expected: str) -> None:
    time = datetime.fromtimestamp(next_time(expression, WEDNESDAY.timestamp()), UTC)
    assert time.strftime("%Y-%m-%d %H:%M") == expected
    assert time.second == 0


def test_a_time_does_not_follow_itself() -> None:
    first = next_time("0 3 * * *", WEDNESDAY.timestamp())
    assert next_time("0 3 * * *", first) == first + 86_400


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("60 * * * *", "'60' is no minute"),
        ("* 24 * * *", "'24' is no hour"),
        ("* * 0 * *", "'0' is no day of the month"),
        ("* * * 13 *", "'13' is no month"),
        ("* * * jan *", "'jan' is no month"),
        ("* * * * 8", "'8' is no day of the week"),
        ("*/0 * * * *", r"'\*/0' is no minute"),
        ("5-1 * * * *", "'5-1' is no minute"),
        ("1-2-3 * * * *", "'1-2-3' is no minute"),
        (", * * * *", "'' is no minute"),
        ("* * * *", "has 4 fields"),
        ("0 0 31 2 *", "matches no date"),
    ],
)
def test_an_expression_that_is_not_valid_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        next_time(expression, WEDNESDAY.timestamp())
