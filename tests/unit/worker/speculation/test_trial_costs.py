"""Costs of a block: which requests and steps count, and what is reported of a pair."""

from __future__ import annotations

import itertools

from specdecode_worker.drafts.swap import MAX_CELLS, BlockCosts, CellSums, CostCell, pair_of


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
