"""Tests of plan dispatch: row selection, buckets with inclusive edges and hysteresis, and refused plans."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import Buckets, Plan, PlanRow, TreeShape
from specdecode_worker.control.plan import Dispatcher, Load, PlanRefused

CHAIN = TreeShape.chain


def row(concurrency: int, context: int, depth: int, task: str = "other") -> PlanRow:
    return PlanRow(concurrency=concurrency, context=context, shape=CHAIN(depth), task=task)


ROWS = (row(0, 0, 5), row(1, 0, 3), row(0, 1, 4), row(0, 0, 7, "code"), row(1, 0, 0, "chat"))


def dispatcher(**fields: Any) -> Dispatcher:
    plan = Plan(**{"uid": "u", "draft": "d", "version": 3, "rows": ROWS, "initial": CHAIN(2), **fields})
    return Dispatcher("u", "d", plan)


@pytest.mark.parametrize(
    ("load", "depth"),
    [
        (Load(0, 0, "other"), 5),
        (Load(0, 0, "code"), 7),
        (Load(1, 0, "code"), 3),
        (Load(1, 0, "chat"), 0),
        (Load(0, 1, "chat"), 4),
        (Load(0, 0, "unheard-of"), 5),
        (Load(4, 2, "code"), 2),
    ],
)
def test_a_tasks_own_row_then_others_row_then_initial(load: Load, depth: int) -> None:
    assert dispatcher().shape(load) == CHAIN(depth)


def test_rows_of_a_new_plan_replace_those_of_the_old_one() -> None:
    worker = dispatcher()
    worker.set_plan(Plan(uid="u", draft="d", version=4, rows=(row(0, 0, 1),), initial=CHAIN(2)))
    assert [worker.shape(Load(concurrency, 0, "code")) for concurrency in (0, 1)] == [CHAIN(1), CHAIN(2)]


def test_rows_for_another_draft_do_not_run() -> None:
    strange = dispatcher(draft="elsewhere")
    assert not strange.matches_draft
    assert not strange.state.matches_draft
    assert strange.shape(Load(0, 0, "other")) == CHAIN(2)
    assert dispatcher(draft="elsewhere", rows=()).matches_draft, "a plan without rows was made for no draft"


def test_a_worker_without_a_plan_runs_plainly() -> None:
    assert Dispatcher("u", "d").shape(Load(0, 0, "other")).nodes == 0


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 0), (1, 0), (1024, 0), (1025, 1), (8192, 1), (8193, 2), (10**6, 2)])
def test_context_edges_are_inclusive_and_the_last_bucket_is_open(tokens: int, bucket: int) -> None:
    assert dispatcher().context(tokens) == bucket


@pytest.mark.parametrize(
    ("running", "bucket"), [(1, 0), (2, 1), (3, 2), (4, 2), (8, 3), (16, 4), (18, 4), (19, 5), (500, 5)]
)
def test_concurrency_edges_are_inclusive_and_the_hysteresis_delays_the_way_up(running: int, bucket: int) -> None:
    assert dispatcher().load(running) == bucket


def test_load_that_oscillates_around_an_edge_does_not_change_the_bucket() -> None:
    plan_dispatcher = dispatcher()
    assert [plan_dispatcher.load(n) for n in (16, 17, 16, 18, 17, 16)] == [4] * 6
    assert [plan_dispatcher.load(n) for n in (19, 17, 18, 17)] == [5] * 4, "once in, it stays until the edge"
    assert plan_dispatcher.load(16) == 4


@given(st.lists(st.integers(0, 60), max_size=30), st.floats(0, 0.9), st.sets(st.integers(1, 40), max_size=6))
def test_a_bucket_never_lies_above_the_load_nor_more_than_the_hysteresis_below(
    loads: list[int], hysteresis: float, edges: set[int]
) -> None:
    buckets = Buckets(concurrency=tuple(sorted(edges)), hysteresis=hysteresis)
    plan_dispatcher = dispatcher(buckets=buckets, rows=())
    for running in loads:
        bucket = plan_dispatcher.load(running)
        assert bucket == 0 or running > buckets.concurrency[bucket - 1]
        assert all(running <= edge * (1 + hysteresis) for edge in buckets.concurrency[bucket:])


def test_a_plan_of_another_deployment_is_refused_and_the_old_one_stays() -> None:
    plan_dispatcher = dispatcher()
    with pytest.raises(PlanRefused, match="uid 'x', this worker belongs to 'u'"):
        plan_dispatcher.set_plan(Plan(uid="x", version=9))
    assert plan_dispatcher.state.version == 3


def test_an_older_version_is_refused_unless_it_is_for_another_draft() -> None:
    plan_dispatcher = dispatcher()
    with pytest.raises(PlanRefused, match="version 2 is older than 3"):
        plan_dispatcher.set_plan(Plan(uid="u", draft="d", version=2))
    plan_dispatcher.set_plan(Plan(uid="u", draft="d", version=3, initial=CHAIN(1)))
    plan_dispatcher.set_plan(Plan(uid="u", draft="new", version=1))
    assert (plan_dispatcher.state.version, plan_dispatcher.state.draft) == (1, "new")


def test_plan_with_fewer_buckets_resets_the_bucket() -> None:
    plan_dispatcher = dispatcher()
    plan_dispatcher.load(100)
    plan_dispatcher.set_plan(Plan(uid="u", draft="d", version=4, buckets=Buckets(concurrency=(64, 128))))
    assert plan_dispatcher.load(100) == 1
    assert plan_dispatcher.load(5) == 0
