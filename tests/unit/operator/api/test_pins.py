"""Tests of pins: what can be read, what runs, and that a shape that cannot run changes nothing."""

from __future__ import annotations

from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.speculation import Pin, pin_operations, pin_text, read_pin
from specdecode_operator.decision.plan import plan
from specdecode_operator.errors import SpecError
from specdecode_operator.planning.estimates import buckets_for
from specdecode_operator.state.learned import LearnedState, TrafficCell
from specdecode_worker.contract import Plan, PlanRow, TreeShape
from support.operators.estimates import chances, cost, spec
from support.operators.fleet import Loop, Truth, deployment_with, loop_over, observation_with, with_pin

TASKS = [{"name": "code"}, {"name": "chat"}]
SPEC = spec(tasks=TASKS)
chain = TreeShape.chain


def pinned(loop: Loop, text: str) -> None:
    loop.deployment = with_pin(loop.deployment, text or None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chain:3", Pin(every=chain(3))),
        (" none ", Pin(every=chain(0))),
        ("tree:2,1", Pin(every=TreeShape.levels(2, 1))),
        ("code=chain:6,chat=none", Pin(by_task={"code": chain(6), "chat": chain(0)})),
        ("code=tree:2,1,chat=chain:1", Pin(by_task={"code": TreeShape.levels(2, 1), "chat": chain(1)})),
        ("other=chain:2", Pin(by_task={"other": chain(2)})),
        ("tree:2,1,code=none", Pin(every=TreeShape.levels(2, 1), by_task={"code": chain(0)})),
        ("", None),
    ],
)
def test_valid_pins_are_parsed(text: str, expected: Pin | None) -> None:
    assert read_pin(text, SPEC) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chian:3", "write chain:3, none"),
        ("chain:17", "at most 16"),
        ("chain:-2", "write none for plain"),
        ("tree:8,8", "no shape of at most 63 nodes"),
        ("sql=chain:2", "no task 'sql'; there are chat, code, other"),
        ("code=chain:2,code=none", "pinned twice"),
        ("code=", "a shape is missing"),
        ("code=none,=chain:2", "names no task"),
    ],
)
def test_an_invalid_pin_is_refused_with_an_example(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read_pin(text, SPEC)


def test_the_pins_of_a_spec_are_read_as_one_text() -> None:
    pins = spec(tasks=[{"name": "code", "pin": "tree:2,1"}, {"name": "chat"}], pin="none")
    assert pin_text(pins) == "none,code=tree:2,1"
    assert pin_text(SPEC) == ""
    pin = read_pin(pin_text(pins), pins)
    assert [pin.shape_of(task) for task in ("code", "chat")] == [TreeShape.levels(2, 1), chain(0)]


@pytest.mark.parametrize(
    ("before", "pin", "after"),
    [
        ({}, Pin(every=chain(3)), {"pin": "chain:3"}),
        ({"pin": "chain:3"}, Pin(), {}),
        (
            {"pin": "none", "tasks": [{"name": "a"}]},
            Pin(by_task={"a": chain(2)}),
            {"tasks": [{"name": "a", "pin": "chain:2"}]},
        ),
        (
            {"tasks": [{"name": "a", "pin": "none"}, {"name": "b"}]},
            Pin(by_task={"other": chain(1)}),
            {"tasks": [{"name": "a"}, {"name": "b"}, {"name": "other", "pin": "chain:1"}]},
        ),
        ({}, Pin(by_task={"other": chain(1)}), {"tasks": [{"name": "other", "pin": "chain:1"}]}),
        ({"tasks": [{"name": "a"}]}, Pin(), {"tasks": [{"name": "a"}]}),
    ],
    ids=str,
)
def test_the_plugin_sets_these_pins_and_no_others(before: dict[str, Any], pin: Pin, after: dict[str, Any]) -> None:
    resource = {"spec": {"speculation": before}}
    changed = jsonpatch.apply_patch(resource, pin_operations(resource, pin))
    assert changed["spec"]["speculation"] == after


def test_a_pin_needs_a_speculation_method() -> None:
    with pytest.raises(SpecError, match=r"method is none"):
        read_pin("chain:3", SPEC.model_copy(update={"method": "none"}))


def test_a_pinned_shape_runs_at_every_load_and_the_guard_stays_on() -> None:
    loop = loop_over(Truth(chances=[0.02] * 5))
    pinned(loop, "chain:4")
    decision = loop.polls(20)
    assert set(loop.depths[1:]) == {4}, "speculation that loses would have been stopped"
    assert decision.plan.guard
    assert decision.shown.recommended == "none", "what Auto would run is told meanwhile"


@pytest.mark.parametrize("mode", ["Off", "Static", "Advisory", "Auto"])
def test_a_pin_overrides_every_mode(mode: str) -> None:
    loop = loop_over(speculation={"mode": mode})
    pinned(loop, "chain:2")
    loop.polls(3)
    assert loop.depths[-1] == 2


def test_a_pin_of_one_task_does_not_change_the_rows_of_others() -> None:
    rows = tuple(PlanRow(concurrency=0, context=0, task=task, shape=chain(1)) for task in ("code", "chat"))
    before = Plan(initial=chain(3), max_depth=3, rows=rows)
    plan = Pin(by_task={"code": chain(6)}).over(before)
    loads = [(c, x) for c in range(len(plan.buckets.concurrency) + 1) for x in range(len(plan.buckets.context) + 1)]
    assert all(plan.shape(*load, "code") == chain(6) for load in loads)
    assert len(plan.rows) == len(loads) + 1
    assert plan.shape(0, 0, "chat") == rows[1].shape
    assert (plan.initial, plan.max_depth) == (chain(3), 6)
    both = Pin(every=chain(0), by_task={"code": chain(6)}).over(before)
    assert [both.shape(0, 0, task).depth for task in ("code", "chat", "other")] == [6, 0, 0]


def test_other_tasks_are_chosen_for_batches_in_which_the_pinned_one_runs_its_pin() -> None:
    """Code drafts deep, and chat with it; where code decodes plainly, a step would make its passes for chat alone."""
    learned = LearnedState(
        uid="u1",
        draft="d",
        acceptance=(*chances(0.95, task="code"), *chances(0.7, task="chat")),
        costs=tuple(cost(n, d, 0.02 + 0.01 * d + 0.0001 * n * (d + 1)) for n in (1, 4, 16) for d in range(6)),
        wander=0.0,
        traffic=tuple(TrafficCell(task=task, sums=(n, n, n, 0, n)) for task, n in (("code", 9e5), ("chat", 1e5))),
    )
    deployment = deployment_with(speculation={"tasks": TASKS})

    def depths(**pins: str) -> dict[str, int]:
        found = plan(with_pin(deployment, None, **pins), observation_with(), learned, buckets_for(16), now=2000.0)
        rows = {row.task: row.shape.depth for row in found.rows if row.load == (4, 0)}
        assert found.plan.shape(4, 0, "chat").depth == rows["chat"]
        return rows

    assert depths()["chat"] > 0
    pinned_rows = depths(code="none")
    assert pinned_rows["chat"] == 0
    assert pinned_rows["code"] > 0, "what the pinned task would run is kept for the time after"


def test_an_invalid_pin_leaves_the_previous_pin_in_force() -> None:
    loop = loop_over()
    pinned(loop, "chain:2")
    loop.polls(2)
    version = loop.versions[-1]
    pinned(loop, "chain:17")
    decision = loop.polls(3)
    assert loop.versions[-1] == version
    assert decision.shown.pinned == "chain:2"
    assert "chain:17" in (decision.shown.pin_problem or "")


def test_an_invalid_first_pin_leaves_the_mode_in_force() -> None:
    loop = loop_over(Truth(chances=[0.02] * 5))
    pinned(loop, "tree:8,8")
    loop.polls(12)
    assert loop.depths[-1] == 0, "Auto goes on"


def test_pinning_and_unpinning_are_recorded_in_the_history() -> None:
    loop = loop_over(speculation={"mode": "Static"})
    loop.polls(2)
    pinned(loop, "chain:4")
    loop.polls(2)
    pinned(loop, "")
    decision = loop.polls(2)
    assert (loop.depths[-2:], decision.shown.pinned) == ([3, 3], ""), "the mode is in force again"
    changes = [(record.before, record.after, record.reason) for record in decision.shown.history]
    assert changes == [
        ("pin chain:4", "mode Static", "spec.speculation.pin"),
        ("mode Static", "pin chain:4", "spec.speculation.pin"),
    ]


def test_a_pin_survives_a_restart_without_a_new_record() -> None:
    loop = loop_over()
    pinned(loop, "chain:4")
    loop.polls(3)
    loop.restart_operator()
    decision = loop.poll()
    assert loop.depths[-1] == 4
    assert not decision.changes


@given(st.text(alphabet="chaintredo:=,0123456789- ", max_size=60))
def test_any_text_is_parsed_or_refused_with_a_spec_error(text: str) -> None:
    try:
        pin = read_pin(text, SPEC)
    except SpecError:
        return
    plan = Plan(initial=chain(3), max_depth=3)
    if pin is not None:
        assert pin.over(plan).max_depth <= 16
        assert pin.over(plan).guard
