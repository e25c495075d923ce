"""The whole pure loop against workers whose truth is known: it finds the best depth, follows changes, stays put."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdecode_operator.api.v1alpha1 import Status, TrafficStatus
from specdecode_operator.planning.acceptance import bounds_of
from specdecode_operator.state.learned import LearnedState, Session
from specdecode_worker.contract import Method, SyntheticKnobs, draft_passes
from support.operators.estimates import chances
from support.operators.fleet import Truth, decided, deployment_with, linear_time, loop_over, per_token, with_pause


def test_depth_falls_with_the_cost_of_deep_trees_and_rises_again() -> None:
    truth = Truth()
    loop = loop_over(truth, explore=0.1, speculation={"limits": {"min_dwell_seconds": 10}})
    loop.polls(20)
    assert loop.depths[-1] >= 3
    truth.step_time = lambda sequences, depth, context: linear_time(sequences, depth, context) + 0.08 * (depth >= 2)
    loop.polls(6)
    assert loop.depths[-1] == 1, "a step of cost must show within half a minute"
    truth.step_time = linear_time
    loop.polls(40)
    assert loop.depths[-1] >= 2


def test_a_load_of_slow_steps_is_seen() -> None:
    """A poll has but a few steps, and the depth in use is that of the row at the present load."""
    loop = loop_over(Truth(sequences=2, step_time=lambda sequences, depth, context: 0.8 + 0.3 * depth))
    loop.polls(3)
    assert loop.memory.learned.load.sequences == 2


def test_the_last_minute_has_no_polls_of_a_clock_that_was_ahead() -> None:
    loop = loop_over()
    loop.polls(6)
    loop.now -= 3600
    loop.polls(2)
    assert [delta.at for delta in loop.memory.window] == [loop.now - 5, loop.now]


@pytest.mark.parametrize("seed", range(4))
def test_constant_input_reaches_a_fixed_point(seed: int) -> None:
    loop = loop_over(Truth(noise=0.2), seed=seed)
    loop.polls(30)
    settled = loop.versions[-1]
    loop.polls(60)
    assert loop.versions[-1] - settled <= 1, f"the plan thrashes: {loop.depths[30:]}"


def test_lost_memory_never_lowers_the_version() -> None:
    loop = loop_over(Truth(chances=[0.2] * 5))
    loop.polls(10)
    running = loop.worker.plan.version
    loop.memory = type(loop.memory)(stored=False)
    assert loop.poll().plan.version > running


@pytest.mark.parametrize(("mode", "depth"), [("Static", 3), ("Advisory", 3), ("Off", 0)])
def test_modes_that_do_not_follow(mode: str, depth: int) -> None:
    loop = loop_over(Truth(chances=[0.2] * 5), speculation={"mode": mode})
    decision = loop.polls(12)
    assert set(loop.depths[1:]) == {depth}
    assert not decision.changes
    assert (decision.shown.recommended is not None) == (mode == "Advisory")


def test_rows_that_are_kept_end_where_the_workers_do() -> None:
    loop = loop_over(engine={"maxNumSeqs": 64})
    assert {row.concurrency for row in loop.polls(2).plan.rows} == set(range(7))
    loop.deployment = loop_over(engine={"maxNumSeqs": 16}, speculation={"mode": "Advisory"}).deployment
    assert {row.concurrency for row in loop.poll().plan.rows} == set(range(5))


def test_method_none_plans_nothing() -> None:
    loop = loop_over(speculation={"method": "none", "draft": None})
    plan = loop.poll().plan
    assert (plan.rows, plan.initial.nodes, plan.max_depth) == ((), 0, 0)


def test_bounds_of_the_spec_hold_at_once() -> None:
    loop = loop_over(Truth())
    loop.polls(6)
    tighter = loop_over(speculation={"depth": {"max": 2, "initial": 2}})
    loop.deployment = tighter.deployment
    loop.poll()
    assert loop.depths[-1] <= 2
    assert loop.decision.plan.max_depth == 2


def test_a_task_that_the_spec_names_no_more_is_forgotten() -> None:
    """Else what was known of it would weigh in all tasks together for ever, which ``other`` is without tasks."""
    known = Session(learned=LearnedState(uid="u1", acceptance=(*chances(0.5), *chances(0.9, task="code"))))
    for tasks, seen in (([{"name": "code"}], {"other", "code"}), ([], {"other"})):
        _, after = decided(deployment_with(speculation={"tasks": tasks}), known)
        assert {cell.task for cell in after.learned.acceptance} == seen


def test_a_paused_deployment_keeps_its_plan_whatever_changes() -> None:
    loop = loop_over(Truth(chances=[0.2] * 5))
    loop.polls(1)
    version = loop.versions[-1]
    changed = loop_over(speculation={"depth": {"max": 1, "initial": 1}, "pin": "chain:1"}).deployment
    loop.deployment = with_pause(changed)
    loop.polls(10)
    assert loop.versions[-1] == version
    loop.deployment = changed
    loop.poll()
    assert loop.versions[-1] > version


def test_speedup_and_acceptance_match_the_truth() -> None:
    truth = Truth(chances=[0.8] * 5)
    loop = loop_over(truth, explore=0.1, speculation={"mode": "Static"})
    found = [loop.poll().shown.figures for _ in range(24)]
    figures = [figure for figure in found if figure and figure.speed][-1]
    drafted = truth.step_time(1, 3, truth.context) / (1 + 0.8 + 0.64 + 0.512)
    plain = truth.step_time(1, 0, truth.context)
    assert figures.speedup == pytest.approx(plain / drafted, rel=0.08)
    assert figures.speed.acceptance_rate == pytest.approx((0.8 + 0.64 + 0.512) / 3, abs=0.05)


def test_figures_come_as_soon_as_knobs_are_turned() -> None:
    """What was measured with knobs on must not be read as what was measured."""
    loop = loop_over()
    while (figures := loop.poll().shown.figures) is None:
        pass
    for knobs in (SyntheticKnobs(acceptance=(0.1,)), None):
        told = TrafficStatus(running=1, waiting=0, tokens_per_second=1, synthetic=figures.synthetic)
        loop.deployment = replace(loop.deployment, status=Status(traffic=told))
        loop.worker.synthetic = knobs
        now = loop.poll().shown.figures
        assert now.synthetic == (knobs is not None)
        figures = now


# --- drafts that propose all depths in one pass ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash"])
def test_a_parallel_draft_runs_deeper_than_one_with_a_pass_for_each_depth(method: Method) -> None:
    """A draft pass takes 8 ms, and a verified token 0.5 ms."""

    def seconds(sequences: float, depth: int, context: float) -> float:
        return 0.020 + 0.008 * draft_passes(method, depth) + 0.0005 * sequences * (depth + 1)

    truth, depths = Truth(chances=[0.75] * 7, step_time=seconds, method=method), {"min": 0, "max": 7, "initial": 3}
    loop = loop_over(truth, explore=0.1, speculation={"method": method, "depth": depths})
    loop.polls(40)
    best = min(range(8), key=lambda depth: per_token(truth, depth))
    assert best == (2 if method == "eagle3" else 7)
    assert per_token(truth, loop.depths[-1]) <= 1.03 * per_token(truth, best), loop.depths


def test_merged_drafts_are_in_the_plan_and_their_passes_count() -> None:
    """The lookup has none."""
    drafts = [{"name": "lookup", "method": "ngram"}, {"name": "sql", "method": "peagle", "uri": "hf://org/head"}]
    merge = [{"draft": "lookup", "depth": 8}, {"draft": "sql"}]
    loop = loop_over(speculation={"drafts": drafts, "tasks": [{"name": "edits", "merge": merge}]})
    (task,) = loop.poll().plan.tasks
    assert [(one.draft, one.depth) for one in task.merge] == [("lookup", 8), ("sql", 0)]
    bounds = bounds_of(loop.deployment.spec.speculation, "edits")
    assert (bounds.methods, bounds.passes(3)) == (("eagle3", "peagle"), 4)
