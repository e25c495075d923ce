"""Tests of the plan's rows, and of reading documents from a newer version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specdecode_worker.contract import (
    MAX_NODES,
    Buckets,
    GuardCell,
    Plan,
    PlanRow,
    PlanState,
    Report,
    SyntheticKnobs,
    TreeShape,
    WorkerConfig,
    suppressed_loads,
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


# Facts that follow from the reports of several workers.


def report(version: int, *suppressed: int) -> Report:
    cells = tuple(
        GuardCell(concurrency=c, context=0, speculative=2, plain=1, suppressed=c in suppressed) for c in range(3)
    )
    return Report(boot_id="b", worker="w", clock_seconds=1, plan=PlanState(version=version), guard=cells)


def test_speculation_is_suspended_where_all_guards_of_the_plan_suspend_it() -> None:
    assert suppressed_loads([report(4, 0, 1), report(4, 1, 2), report(3)], 4) == {(1, 0)}
    assert suppressed_loads([], 4) == set()


def test_a_guard_without_a_verdict_has_no_say() -> None:
    undecided = report(4).model_copy(update={"guard": ()})
    assert suppressed_loads([report(4, 1), undecided], 4) == {(1, 0)}


# Tests of draft trees: text forms, derived values and refused input.


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    parents: list[int] = []
    for node in range(1, draw(st.integers(0, 20)) + 1):
        parents.append(draw(st.integers(parents[-1] if parents else 0, node - 1)))
    return TreeShape(tuple(parents))


@pytest.mark.parametrize(
    ("text", "parents"),
    [
        ("none", ()),
        ("chain:0", ()),
        ("chain:3", (0, 1, 2)),
        ("tree:2,2", (0, 0, 1, 1, 2, 2)),
        ("tree:3,1", (0, 0, 0, 1, 2, 3)),
        ("0,0,1", (0, 0, 1)),
    ],
)
def test_text_forms(text: str, parents: tuple[int, ...]) -> None:
    assert TreeShape.parse(text).parents == parents


@given(shapes())
def test_text_and_json_round_trip(shape: TreeShape) -> None:
    assert TreeShape.parse(str(shape)) == shape
    assert TreeShape.model_validate_json(shape.model_dump_json()) == shape


@given(shapes())
def test_depths_and_ranks_follow_the_parents(shape: TreeShape) -> None:
    for node, parent in enumerate(shape.parents, start=1):
        assert shape.depths[node] == shape.depths[parent] + 1
        assert list(shape.children(parent))[shape.ranks[node]] == node
    assert shape.is_chain == (shape.depth == shape.nodes)


@pytest.mark.parametrize(
    "bad", ["chain:x", "tree:0", "tree:9,9", "1", "0,2", "0,1,0", "nonsense", f"chain:{MAX_NODES + 1}"]
)
def test_invalid_shape_is_refused_with_the_reason(bad: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TreeShape.parse(bad)
    assert any(word in str(caught.value) for word in ("tree", "parent", "order", "nodes"))
