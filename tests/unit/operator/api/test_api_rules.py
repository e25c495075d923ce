"""Tests of the resource's rules, which are written twice, as CEL and as validators: both get the same examples.

A real API server judges the CEL rules, in server-side dry runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api.v1alpha1 import Spec, is_valid_name
from support.operators.api_examples import BAD, GOOD, NAMES, merging, spec_with
from support.operators.fleet import SPEC, deep


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_valid_specs_are_parsed(change: dict[str, Any]) -> None:
    Spec.model_validate(spec_with(change))


@pytest.mark.parametrize(("change", "words"), BAD, ids=str)
def test_validators_refuse_invalid_specs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Spec.model_validate(spec_with(change))


@pytest.mark.parametrize(("name", "is_valid"), NAMES.items())
def test_names_that_cannot_become_a_service_are_invalid(name: str, is_valid: bool) -> None:
    assert is_valid_name(name) == is_valid


def test_the_plan_names_the_drafts_that_a_task_merges() -> None:
    spec = Spec.model_validate(deep(SPEC, {"speculation": merging({"draft": "lookup", "depth": 8}, {"draft": "sql"})}))
    (task,) = spec.speculation.tasks
    match = task.for_worker()
    assert [(one.draft, one.depth) for one in match.merge] == [("lookup", 8), ("sql", 0)]
    assert (match.name, match.match, match.draft) == ("edits", None, None)
