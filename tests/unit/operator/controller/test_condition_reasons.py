"""Check that docs/reference/conditions-and-alerts.md lists every condition, and every reason that the code can give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from specdecode_operator.api.v1alpha1 import ConditionType
from specdecode_operator.controller.status import build, conditions, drafts
from specdecode_operator.types import ScalingLimit, UnhealthyWorker
from support.kube import ROOT

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
}
"""Capitalised words of the code that are statuses, kinds, a mode that status shows, and foreign names."""


def reasons() -> set[str]:
    sources = "".join(Path(module.__file__).read_text() for module in (build, conditions, drafts))
    literals = set(re.findall(r"\"([A-Z][a-z]+(?:[A-Z][a-z]+)*)\"", sources)) - NO_REASONS
    foreign = {
        reason for kind in (ScalingLimit, UnhealthyWorker) for reason in get_args(get_type_hints(kind)["reason"])
    }
    return literals | foreign | {"SpecRefused"}


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """Return the cells of the tables in the section on conditions."""
    page = (ROOT / "docs" / "reference" / "conditions-and-alerts.md").read_text()
    section = page.split("\n## Conditions\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def test_every_reason_is_explained(rows: list[list[str]]) -> None:
    explained = {word for row in rows for word in re.findall(r"\w+", row[1])}
    assert {"ChildRefused", "Paused", "SlowSteps"} <= reasons(), "the search works"
    assert reasons() - explained == set()


def test_every_condition_is_explained(rows: list[list[str]]) -> None:
    explained = {word for row in rows for word in re.findall(r"\w+", row[0])}
    assert {kind.value for kind in ConditionType} - explained == set()
