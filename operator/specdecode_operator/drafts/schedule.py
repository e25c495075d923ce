"""Times of a cron expression of five fields, in UTC: minute, hour, day of the month, month, day of the week.

A field is `*`, a number, a range `a-b`, each with `/step` if wanted, or several of these with commas. Sunday is 0 or 7.
If both days are restricted, either is enough, as in cron.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache

_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))
_PART = re.compile(r"(?:\*|(\d{1,2})(?:-(\d{1,2}))?)(?:/(\d{1,2}))?")
_DAYS = 8 * 366
"""Days within which every date of the calendar comes; eight years pass between 29 February 1896 and 1904."""


@lru_cache(maxsize=256)
def next_time(expression: str, after: float) -> float:
    """Return the first time of the expression after ``after``, in seconds since the epoch.

    Raises:
        ValueError: The expression is not valid, or no date matches it.
    """
    minutes, hours, days, months, weekdays = _parsed(expression)
    restricted = [not field.startswith("*") for field in expression.split()]
    first = datetime.fromtimestamp(after, UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    for offset in range(_DAYS):
        date = first.replace(hour=0, minute=0) + timedelta(days=offset)
        of_month, of_week = date.day in days, date.isoweekday() % 7 in weekdays
        is_day = of_month or of_week if restricted[2] and restricted[4] else of_month and of_week
        if date.month not in months or not is_day:
            continue
        times = (date.replace(hour=hour, minute=minute) for hour in sorted(hours) for minute in sorted(minutes))
        if (time := next((time for time in times if time >= first), None)) is not None:
            return time.timestamp()
    raise ValueError(f"{expression!r} matches no date")


def _parsed(expression: str) -> list[set[int]]:
    fields = expression.split()
    if len(fields) != len(_FIELDS):
        raise ValueError(f"{expression!r} has {len(fields)} fields instead of five")
    minutes, hours, days, months, weekdays = (
        {number for part in text.split(",") for number in _numbers(part, *field)}
        for text, field in zip(fields, _FIELDS, strict=True)
    )
    return [minutes, hours, days, months, {day % 7 for day in weekdays}]


def _numbers(part: str, name: str, least: int, most: int) -> Iterator[int]:
    match = _PART.fullmatch(part)
    first, last, step = (int(group) if group else None for group in (match.groups() if match else ("1", "0", None)))
    start = least if first is None else first
    end = last if last is not None else most if first is None or step else start
    if step == 0 or not least <= start <= end <= most:
        raise ValueError(f"{part!r} is no {name}: {least} to {most}, such as *, {least}, {least}-{most} or */2")
    yield from range(start, end + 1, step or 1)
