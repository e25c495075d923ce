"""Pod templates of any shape: merged over the operator's, or refused with the place in the spec, without an API server.

The fuzz test of the CRD (tests/unit/operator/api) takes the same templates through admission.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from specdecode_operator.errors import SpecError
from specdecode_operator.manifests import pod_template, resolved_image
from support.operators.fleet import DEFAULTS, deployment_with
from support.operators.spec_strategies import TEMPLATE

CASES = 400


@pytest.mark.slow
def test_every_template_is_merged_or_refused_with_its_place() -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(TEMPLATE)
    def judge(template: Any) -> None:
        try:
            made = pod_template(deployment_with(workers={"template": template}), DEFAULTS)
        except SpecError as error:
            outcomes["refused" if str(error).startswith("workers.template") else str(error)] += 1
            return
        json.dumps(made, allow_nan=False)
        resolved_image(made)
        outcomes["merged"] += 1

    judge()
    assert outcomes.keys() == {"refused", "merged"}, "a refusal names the place"
    assert outcomes["refused"] >= CASES // 5, outcomes
    assert outcomes["merged"] >= CASES // 5, outcomes
