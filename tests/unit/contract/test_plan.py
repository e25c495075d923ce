"""Tests of the plan's rows, and of reading documents from a newer version."""

import pytest
from pydantic import ValidationError

from specdecode_worker.contract import (
    Buckets,
    Plan,
    PlanRow,
    Report,
    SyntheticKnobs,
    TreeShape,
    WorkerConfig,
)


def row(concurrency: int, context: int, task: str, depth: int) -> PlanRow:
    return PlanRow(concurrency=concurrency, context=context, task=task, shape=TreeShape.chain(depth))


def test_row_of_the_task_takes_precedence_over_the_row_of_other() -> None:
    plan = Plan(rows=(row(0, 0, "other", 2), row(0, 0, "code", 0)), initial=TreeShape.chain(4))
    assert plan.shape(0, 0, "code").depth == 0
    assert plan.shape(0, 0, "prose").depth == 2
    assert plan.shape(1, 0, "code").depth == 4


def test_rows_must_lie_in_buckets_that_exist() -> None:
    buckets = Buckets(concurrency=(1, 4), context=(1024,))
    Plan(buckets=buckets, rows=(row(2, 1, "other", 1),))
    for outside in (row(3, 0, "other", 1), row(0, 2, "other", 1)):
        with pytest.raises(ValidationError, match="bucket that does not exist"):
            Plan(buckets=buckets, rows=(outside,))


@pytest.mark.parametrize("edges", [(4, 2), (0, 1), (2, 2)])
def test_bucket_edges_must_rise(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="must rise"):
        Buckets(concurrency=edges)


def test_unknown_fields_of_newer_plans_and_reports_are_ignored() -> None:
    text = Plan(version=3, rows=(row(0, 0, "other", 2),)).model_dump_json()
    assert Plan.model_validate_json(text[:-1] + ',"invented_later":1}').version == 3
    report = Report(boot_id="b", worker="w", clock_seconds=1.0).model_dump_json()
    assert Report.model_validate_json(report[:-1] + ',"invented_later":{}}').boot_id == "b"


def test_unknown_fields_of_user_input_are_refused() -> None:
    with pytest.raises(ValidationError, match="served_nam"):
        WorkerConfig.model_validate({"model": {"uri": "file:///m", "served_name": "m", "served_nam": "m"}})
    with pytest.raises(ValidationError, match="acceptence"):
        SyntheticKnobs.model_validate({"acceptence": [0.5]})


def test_draft_needs_a_uri_and_method_none_refuses_one() -> None:
    model = {"uri": "file:///m", "served_name": "m"}
    for draft in ({"method": "eagle3"}, {"method": "none", "uri": "file:///d"}):
        with pytest.raises(ValidationError, match=r"draft\.uri is needed"):
            WorkerConfig.model_validate({"model": model, "draft": draft})
