"""Trials of drafts: the order of the blocks, which requests and steps count, and the pairs that the report holds."""

from __future__ import annotations

import itertools

from specdecode_worker.contract import Artifact, DraftConfig, DraftTrial, candidate_first
from specdecode_worker.drafts.swap import (
    MAX_CELLS,
    MAX_PAIRS,
    MAX_PAIRS_BYTES,
    BlockCosts,
    CellSums,
    CostCell,
    DraftGoal,
    TrialRun,
    pair_of,
)


def trial(**fields: int) -> DraftTrial:
    return DraftTrial(id="t", candidate=Artifact(uri="file:///c", hash="c"), pod="p", **fields)


def run_of(**fields: int) -> TrialRun:
    return TrialRun(trial(**fields), DraftGoal(DraftConfig(method="none")))


def run_block(run: TrialRun, cells: int = 1) -> None:
    """Run one block that costs 1 s in each cell for the incumbent and 2 s for the candidate."""
    block = run.begin_block()
    seconds = 2.0 if run.is_candidates_turn else 1.0
    for index in range(cells):
        block.admit(f"r{index}")
        block.add_row(f"r{index}", f"task-{index}", 1)
    block.end_step(0, 0, seconds)
    run.end_block(block)


def test_every_pair_runs_both_drafts_in_the_order_of_its_coin() -> None:
    run = run_of(first_pair=5)
    orders = []
    for index in range(5, 25):
        assert (run.pair, run.is_between_pairs) == (index, True)
        order = [run.is_candidates_turn]
        run_block(run)
        assert not run.is_between_pairs
        order.append(run.is_candidates_turn)
        run_block(run)
        assert order == [candidate_first("t", index), not candidate_first("t", index)]
        orders.append(order[0])
        newest = run.pairs[-1]
        assert newest.index == index
        assert [[cost.sequence_seconds for cost in side] for side in (newest.incumbent, newest.candidate)] == [[1], [2]]
    assert set(orders) == {True, False}, "both orders occur"
    assert [pair.index for pair in run.pairs] == list(range(25 - MAX_PAIRS, 25))


def test_the_pairs_fit_into_the_report_and_the_newest_is_always_there() -> None:
    run = run_of()
    for _ in range(2 * MAX_PAIRS):
        run_block(run, cells=40)
    sizes = [len(pair.model_dump_json()) for pair in run.pairs]
    assert 1 <= len(sizes) < MAX_PAIRS
    assert sum(sizes) <= MAX_PAIRS_BYTES
    assert run.pairs[-1].index == run.pair - 1


def test_a_block_has_the_size_that_the_trial_says_and_pairs_counted_elsewhere_are_skipped() -> None:
    run = run_of(block_requests=1)
    run_block(run)
    run.trial = trial(block_requests=2, first_pair=7)
    block: BlockCosts = run.begin_block()
    block.admit("a")
    block.end_request("a", emitted=True)
    assert not block.is_complete
    run.end_block(block)
    assert run.pair == 7


def step(block: BlockCosts, *rows: tuple[str, str, int], seconds: float = 1.0, load: tuple[int, int] = (0, 0)) -> None:
    for row in rows:
        block.add_row(*row)
    block.end_step(*load, seconds)


def test_a_step_costs_its_duration_for_every_sequence_of_the_task() -> None:
    block = BlockCosts(3)
    for name in ("a", "b", "c"):
        block.admit(name)
    step(block, ("a", "code", 2), ("b", "code", 1), ("c", "chat", 4), seconds=0.5)
    step(block, ("a", "code", 3), seconds=0.25, load=(1, 2))
    step(block, seconds=9.0)
    assert block.cells == {
        CostCell("code", 0, 0): CellSums(1.0, 3),
        CostCell("chat", 0, 0): CellSums(0.5, 4),
        CostCell("code", 1, 2): CellSums(0.25, 3),
    }


def test_a_member_that_is_cancelled_before_its_first_token_does_not_count() -> None:
    block = BlockCosts(1)
    block.admit("a")
    block.end_request("a", emitted=False)
    block.end_request("a", emitted=True)
    assert not block.is_complete


def test_both_sides_of_a_pair_lose_the_cells_that_weigh_least() -> None:
    cells = [CostCell(f"t{task}", load, 0) for task, load in itertools.product(range(12), range(6))]
    incumbent = {cell: CellSums(1.23456789, 1 + index) for index, cell in enumerate(cells)}
    candidate = {cell: CellSums(2.0, 1 + index) for index, cell in enumerate(cells)}
    alone = CostCell("alone", 0, 0)
    pair = pair_of(3, incumbent | {alone: CellSums(1.0, 10**6)}, candidate)
    reported = {(cost.task, cost.concurrency) for cost in pair.incumbent}
    assert reported == {(cost.task, cost.concurrency) for cost in pair.candidate}
    assert (pair.index, len(reported)) == (3, MAX_CELLS)
    assert reported == {(cell.task, cell.concurrency) for cell in cells[-MAX_CELLS:]}, (
        "a cell of one side weighs nothing"
    )
    assert {cost.sequence_seconds for cost in pair.incumbent} == {1.23457}
