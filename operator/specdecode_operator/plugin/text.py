"""Text of tables, ages and numbers. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from specdecode_operator.times import seconds_of_timestamp

ABSENT = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Return lines of left-aligned columns, as kubectl prints them."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    return [
        indent + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    ]


def figure(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:+.0f} %"


def word(value: object) -> str:
    return ABSENT if value is None or value == "" else str(value)


def age(time: str | None, now: float) -> str:
    """Return the age of a Kubernetes timestamp, such as 45s, 12m, 5h or 3d."""
    if not time:
        return ABSENT
    try:
        seconds = max(0.0, now - seconds_of_timestamp(time))
    except ValueError:
        return ABSENT
    for unit, size, most in (("s", 1, 120), ("m", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def wrapped(text: str, indent: str, width: int = 110) -> list[str]:
    return textwrap.wrap(text, width=width, initial_indent=indent, subsequent_indent=indent) or []
