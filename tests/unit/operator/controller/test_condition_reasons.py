"""Check the list of reasons, of which the reference page is made: it has every condition and reason of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

from specdecode_operator.api.reasons import CONDITIONS, REASONS
from specdecode_operator.api.v1alpha1 import ConditionType
from specdecode_operator.controller.status import build, conditions, drafts
from specdecode_operator.types import ScalingLimit, UnhealthyWorker

NO_REASONS = {
    "True",
    "False",
    "Unknown",
    "Deployment",
    "Off",
    "Operator",
    "External",
    "NotOwned",
    "Refused",
    "Unavailable",
    "CrashLoopBackOff",
    "Pinned",
    "Absent",
}
"""Capitalised words of the code that are statuses, kinds, words of other fields of status, and foreign names."""


GIVEN_ELSEWHERE: set[str] = set()
"""Reasons that other modules than those of ``reasons`` give."""


def reasons() -> set[str]:
    sources = "".join(Path(module.__file__).read_text() for module in (build, conditions, drafts))
    literals = set(re.findall(r"\"([A-Z][a-z]+(?:[A-Z][a-z]+)*)\"", sources)) - NO_REASONS
    foreign = {
        reason for kind in (ScalingLimit, UnhealthyWorker) for reason in get_args(get_type_hints(kind)["reason"])
    }
    return literals | foreign | {"SpecRefused"}


def test_every_reason_is_listed_and_no_other() -> None:
    listed = {one.reason for one in REASONS}
    assert {"ChildRefused", "Paused", "SlowSteps"} <= reasons(), "the search works"
    assert reasons() - listed == set()
    assert listed - reasons() - GIVEN_ELSEWHERE == set()


def test_every_condition_is_listed_with_its_reasons() -> None:
    assert CONDITIONS.keys() == set(ConditionType)
    assert {one.condition for one in REASONS} == set(ConditionType)
    assert len({one[:3] for one in REASONS}) == len(REASONS)
    assert {one.status for one in REASONS} == {"True", "False", "Unknown"}
    assert all(one.meaning and one.action for one in REASONS)
