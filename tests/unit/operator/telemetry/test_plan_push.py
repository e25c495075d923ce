"""Rule for pushes: which workers need which plan."""

from __future__ import annotations

import pytest

from specdecode_operator.state.deployment_state import Published
from specdecode_operator.state.packed import Packed
from specdecode_operator.telemetry.plan_push import RunningPlan, needs_plan, plans_to_push
from specdecode_worker.contract import Plan

COMMON, QUIET = Plan(uid="u", version=5), Plan(uid="u", version=5, quiet=True)
CURRENT = RunningPlan("u", 5, quiet=False)


@pytest.mark.parametrize(
    ("running", "needed"),
    [
        (CURRENT, False),
        (RunningPlan("u", 4, quiet=False), True),
        (RunningPlan("u", 6, quiet=False), False),
        (RunningPlan("other", 9, quiet=False), True),
        (RunningPlan("u", 5, quiet=True), True),
        (RunningPlan("", 0, quiet=False), True),
    ],
)
def test_the_common_plan_is_needed(running: RunningPlan, needed: bool) -> None:
    assert needs_plan(running, "u", 5, quiet=False) is needed


def published(**fields: object) -> Published:
    return Published(**{"uid": "u", "version": 5, "plan": Packed.of(COMMON), **fields})  # type: ignore[arg-type]


def test_workers_with_an_own_plan_get_that_one_only() -> None:
    state = published(own={"b": Packed.of(QUIET)}, excluded=frozenset({"b", "c"}))
    old = RunningPlan("u", 4, quiet=False)
    running = {"a": old, "b": old, "c": RunningPlan("u", 5, quiet=True), "d": CURRENT}
    assert plans_to_push(state, running) == {"a": COMMON, "b": QUIET}


def test_an_own_plan_that_runs_is_not_pushed_again() -> None:
    state = published(own={"b": Packed.of(QUIET)}, excluded=frozenset({"b"}))
    assert plans_to_push(state, {"b": RunningPlan("u", 5, quiet=True)}) == {}


def test_an_own_plan_waits_until_its_version_is_persisted() -> None:
    newer = QUIET.model_copy(update={"version": 6})
    state = published(own={"b": Packed.of(newer)})
    assert plans_to_push(state, {"b": RunningPlan("u", 4, quiet=False)}) == {}


def test_workers_without_a_report_get_nothing() -> None:
    assert plans_to_push(published(own={"b": Packed.of(QUIET)}), {}) == {}
