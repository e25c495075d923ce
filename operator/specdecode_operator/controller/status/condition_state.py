"""State of one condition, and texts of status. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from specdecode_operator.api.v1alpha1 import ConditionType

# Numbers, times and lists as status shows them. Rounded, because each change of status is a write.

ROUNDING = 0.05
"""Step of rates, lengths and speed-ups. Finer steps would change with every publication and mean nothing."""
NAMED_ITEMS = 4
"""Pods that a message names, so that it stays one line."""


def rounded(value: float | None) -> float | None:
    """Return ``value`` rounded to ROUNDING."""
    return None if value is None else round(round(value / ROUNDING) * ROUNDING, 2)


def two_digits(value: float | None) -> float | None:
    """Return ``value`` rounded to two significant digits."""
    return None if value is None else float(f"{value:.2g}")


def milliseconds(seconds: float | None) -> float | None:
    """Return ``seconds`` as milliseconds with two significant digits."""
    return None if seconds is None else two_digits(1000 * seconds)


def gib(size: int) -> str:
    """Return bytes as a Kubernetes quantity, rounded to 0.01 Gi."""
    return f"{size / 2**30:.2f}Gi"


def enumerated(items: Sequence[str]) -> str:
    """Return the first NAMED_ITEMS items in one line, and the number of the others."""
    others = len(items) - NAMED_ITEMS
    return "; ".join([*items[:NAMED_ITEMS], *([f"and {others} more"] if others > 0 else [])])


# State of one condition, before build.py adds the time of its transition.


class ConditionState(NamedTuple):
    """State of one condition, without the time of its transition."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    bad: bool = False
    """True if the REASON column shows it."""
