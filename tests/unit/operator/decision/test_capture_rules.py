"""Capture in the plan: what the spec says, which values are refused, and what a change of it does."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.decision.plan import capture_rules
from specdecode_operator.errors import SpecError
from specdecode_operator.state.learned import UNUSED
from specdecode_worker.contract import CaptureRules
from support.operators.canary import Canary
from support.operators.fleet import deployment_with


def capture(**fields: Any) -> dict[str, Any]:
    return {"distillation": {"capture": fields}}


def test_rules_are_those_of_the_spec_and_delete_what_the_record_says() -> None:
    fields = {"percent": 20, "percentByTask": {"code": 50}, "maxAge": "48h", "consent": "OptIn"}
    record = UNUSED.model_copy(update={"captures_deleted_before": 99.0})
    assert capture_rules(deployment_with(**capture(**fields, redact="mine:names")), record) == CaptureRules(
        share=0.2,
        task_shares={"code": 0.5},
        max_age_seconds=48 * 3600,
        redact="mine:names",
        consent="OptIn",
        delete_before=99.0,
    )
    assert capture_rules(deployment_with(), record) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"percentByTask": {"no task": 50}}, "capture.percentByTask: "),
        ({"maxAge": "0s"}, "capture.maxAge: "),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_its_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=f"distillation.{field}"):
        capture_rules(deployment_with(**capture(**fields)), UNUSED)


@pytest.mark.parametrize("fields", [{"percent": 0}, {"percent": 1}, {"percent": 100}], ids=str)
def test_limits_themselves_are_allowed(fields: dict[str, Any]) -> None:
    assert capture_rules(deployment_with(**capture(**fields)), UNUSED) is not None


def test_a_change_raises_the_version_and_is_pushed_without_rolling_pods() -> None:
    canary = Canary(deployment_with(replicas=2))
    before = canary.tick()
    canary.change(**capture())
    after = canary.tick(push=False)
    assert after.plan.capture == CaptureRules()
    assert after.plan.version == before.plan.version + 1
    assert set(after.pushes) == {"10.0.0.1", "10.0.0.2"}
    assert after.children[-1] == before.children[-1], "the workload is the same"
    assert canary.tick(push=False).plan == after.plan
    canary.change(distillation={})
    assert canary.tick().plan.capture is None
