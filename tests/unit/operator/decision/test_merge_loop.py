"""The closed loop over a simulated worker: drafts that cost more than they bring leave, and come back if they help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdecode_operator.api.v1alpha1 import SpeculationStatus, Status
from specdecode_operator.controller.status import task_sections
from specdecode_operator.planning.acceptance import bounds_of
from specdecode_worker.contract import TreeShape
from support.operators.fleet import Loop, with_pin
from support.operators.merging import OWN, QUICK, TASK, MergedTruth, MergingWorker, merging_loop
from support.operators.statuses import explained, resource_of


def worker_of(loop: Loop) -> MergingWorker:
    assert isinstance(loop.worker, MergingWorker)
    return loop.worker


def changes(loop: Loop, polls: int) -> list[tuple[str, str, str | None]]:
    """Run the loop, and return the changes of merged drafts."""
    moved = []
    for _ in range(polls):
        records = loop.poll().changes
        moved += [(one.before, one.after, one.cause) for one in records if one.before.startswith("merge")]
    return moved


def test_a_draft_that_never_hits_is_dropped_and_taken_back_when_the_traffic_turns() -> None:
    head = MergedTruth(rescue=0.0, agreement=0.2)
    loop = merging_loop({"head": head}, limits={**QUICK, "explore_percent": 5})
    assert changes(loop, 20) == [("merge head", "merge nothing", "gain")]
    assert worker_of(loop).running == []
    choice = loop.memory.learned.merges[0]
    assert choice.reason.startswith("head dropped: +0 % tokens for ")
    loop.restart_operator()
    assert loop.poll().plan.tasks[0].merge == ()
    head.rescue = 0.8
    loop.now = choice.since + 595
    assert changes(loop, 14) == [
        ("merge nothing", "merge head on trial", "trial"),
        ("merge head on trial", "merge head", "trial"),
    ]
    assert worker_of(loop).running == ["head"]


def test_of_two_drafts_the_one_without_credit_leaves() -> None:
    merged = {"lookup": MergedTruth(rescue=0.4, method="ngram"), "head": MergedTruth(rescue=0.0, agreement=0.2)}
    loop = merging_loop(merged)
    assert changes(loop, 20) == [("merge lookup, head", "merge lookup", "gain")]
    before, after = worker_of(loop).passes(3), loop.memory.learned
    assert before == 3
    cells = [one for one in after.acceptance if (one.task, one.depth) == (TASK, 1)]
    assert cells[0].hits / cells[0].total == pytest.approx(0.76, abs=0.08), "what it measures is that of both drafts"


def test_acceptance_with_a_merged_draft_is_not_that_without() -> None:
    """A costly head leaves although it helps, and rows are then chosen by the own draft's rate alone."""
    loop = merging_loop({"head": MergedTruth(rescue=0.2)}, pass_seconds=0.006)
    for _ in range(30):
        if any(one.after == "merge nothing" for one in loop.poll().changes):
            break
    (cell,) = (one for one in loop.memory.learned.acceptance if (one.task, one.depth) == (TASK, 1))
    assert cell.total <= 60
    assert cell.hits / cell.total == pytest.approx(0.6, abs=0.06)
    assert cell.changed_at == loop.now


@pytest.mark.parametrize("mode", ["Static", "Off", "Advisory"])
def test_other_modes_merge_as_declared(mode: str) -> None:
    loop = merging_loop({"head": MergedTruth(rescue=0.0)}, mode=mode)
    assert changes(loop, 20) == []
    assert [one.draft for one in loop.worker.plan.tasks[0].merge] == ["head"]
    assert loop.memory.learned.merges == ()
    text = next(one.shown.merges for one in reversed([loop.poll() for _ in range(7)]) if one.shown.merges)[TASK]
    assert text.startswith("merges head")
    assert ("mode Auto would merge nothing: head dropped" in text) == (mode == "Advisory")


def test_rows_outside_of_the_bounds_of_a_new_spec_are_no_obstacle() -> None:
    loop = merging_loop({"head": MergedTruth(rescue=0.8)}, limits={"max_changes_per_hour": 1}, tree={"topK": 1})
    loop.polls(8)
    learned, wide = loop.memory.learned, TreeShape.parse("tree:3,2,1")
    rows = tuple(row.running(wide, since=loop.now - 100) for row in learned.rows)
    loop.memory = replace(loop.memory, learned=learned.model_copy(update={"rows": rows}))
    assert all(row.shape.is_chain for row in loop.poll().plan.rows)


def test_a_pin_keeps_the_drafts() -> None:
    loop = merging_loop({"head": MergedTruth(rescue=0.0)})
    loop.deployment = with_pin(loop.deployment, "chain:3")
    assert changes(loop, 20) == []
    assert worker_of(loop).running == ["head"]


def test_the_step_times_and_the_status_are_of_the_drafts_that_run() -> None:
    loop = merging_loop({"head": MergedTruth(rescue=0.0)})
    changes(loop, 20)
    spec = loop.deployment.spec.speculation
    assert bounds_of(spec, TASK).passes(3) == 6, "as declared"
    rows = [row for row in loop.memory.learned.rows if row.task == TASK and row.since]
    assert rows
    assert worker_of(loop).depth > 1, "with the passes of both heads, a chain of 1 is the best"
    decision = next(one for one in reversed([loop.poll() for _ in range(7)]) if one.shown.merges)
    (task,) = (one for one in task_sections(loop.deployment, decision) if one.name == TASK)
    assert task.merge == f"merges nothing; {loop.memory.learned.merges[0].reason}"
    status = Status(tasks=(task,), speculation=SpeculationStatus(depth=2))
    text = explained(resource_of(replace(loop.deployment, status=status)), None, loop.now)
    assert f"Task {TASK} {task.merge}." in text


def test_another_own_draft_begins_with_all_drafts() -> None:
    loop = merging_loop({"head": MergedTruth(rescue=0.0)})
    changes(loop, 20)
    loop.worker.truth.draft = "d2"
    assert changes(loop, 2)[:1] == [("merge nothing", "merge head", "bounds")]
    assert OWN not in loop.memory.learned.merges[0].hashes
