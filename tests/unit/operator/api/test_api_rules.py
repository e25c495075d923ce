"""Tests of the resource's models. The API server judges the rules: tests/api_server/crd/test_api_rules.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.times import seconds_of
from support.operators.api_examples import BAD, GOOD, merging, spec_with
from support.operators.crd_fields import SCHEMA
from support.operators.fleet import SPEC, deep


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_valid_specs_are_parsed(change: dict[str, Any]) -> None:
    Spec.model_validate(spec_with(change), extra="forbid")


def rules_of(node: Any) -> Iterator[str]:
    """Yield the messages of all rules of a schema, but for rules over time."""
    if isinstance(node, dict):
        rules = node.get("x-kubernetes-validations", ())
        yield from (rule["message"] for rule in rules if "oldSelf" not in rule["rule"])
        for inner in node.values():
            yield from rules_of(inner)


def test_every_rule_has_an_example_that_it_alone_refuses() -> None:
    """The API server must refuse the example with this message, so a rule that is dropped does not go unnoticed."""
    messages = set(rules_of(SCHEMA["properties"]["spec"]))
    assert len(messages) > 30
    sentences = [words for _, words in BAD if " " in words]
    assert [message for message in sorted(messages) if not any(re.search(one, message) for one in sentences)] == []


@pytest.mark.parametrize(
    ("duration", "seconds"), [("1h30m", 5400), ("90s", 90), ("2h", 7200), ("500ms", 0.5), ("22.5ms", 0.0225)]
)
def test_durations_have_seconds(duration: str, seconds: float) -> None:
    assert seconds_of(duration) == pytest.approx(seconds)


def test_the_plan_names_the_drafts_that_a_task_merges() -> None:
    spec = Spec.model_validate(deep(SPEC, {"speculation": merging({"draft": "lookup", "depth": 8}, {"draft": "sql"})}))
    (task,) = spec.speculation.tasks
    match = task.for_worker()
    assert [(one.draft, one.depth) for one in match.merge] == [("lookup", 8), ("sql", 0)]
    assert (match.name, match.match, match.draft) == ("edits", None, None)
