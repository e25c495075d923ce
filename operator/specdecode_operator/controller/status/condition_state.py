"""State of one condition, before build.py adds the time of its transition."""

from __future__ import annotations

from typing import Literal, NamedTuple

from specdecode_operator.api.v1alpha1 import ConditionType


class ConditionState(NamedTuple):
    """State of one condition, without the time of its transition."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    bad: bool = False
    """True if the REASON column shows it."""
