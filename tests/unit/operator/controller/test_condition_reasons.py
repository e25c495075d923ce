"""Check the list of which the reference page is made: it has every condition and every reason of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from specdecode_operator.api.v1alpha1 import ConditionType
from specdecode_operator.controller import deployment_loop, status
from specdecode_operator.types import ScalingLimit, UnhealthyWorker

CONDITIONS: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[4] / "docs" / "reference" / "conditions.yaml").read_text()
)
NO_REASONS = {
    "True",
    "False",
    "Unknown",
    "Deployment",
    "Off",
    "Advisory",
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


def reasons() -> set[str]:
    sources = Path(status.__file__).read_text()
    literals = set(re.findall(r"\"([A-Z][a-z]+(?:[A-Z][a-z]+)*)\"", sources)) - NO_REASONS
    foreign = {
        reason for kind in (ScalingLimit, UnhealthyWorker) for reason in get_args(get_type_hints(kind)["reason"])
    }
    failures = re.findall(r'_show_failure\(resource, observed, "(\w+)"', Path(deployment_loop.__file__).read_text())
    return literals | foreign | set(failures)


def test_every_reason_is_listed_and_no_other() -> None:
    listed = {one["reason"] for condition in CONDITIONS.values() for one in condition["reasons"]}
    assert {"ChildRefused", "Paused", "SlowSteps", "SpecRefused"} <= reasons(), "the search works"
    assert reasons() - listed == set()
    assert listed - reasons() == set()


def test_every_condition_is_listed_with_its_reasons() -> None:
    assert CONDITIONS.keys() == set(ConditionType)
    for condition in CONDITIONS.values():
        rows = condition["reasons"]
        assert rows
        assert condition["means"]
        assert len({(one["status"], one["reason"]) for one in rows}) == len(rows)
        assert {one["status"] for one in rows} <= {"True", "False", "Unknown"}
        assert all(one["meaning"] and one["do"] for one in rows)
