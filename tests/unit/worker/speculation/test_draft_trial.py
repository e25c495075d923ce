"""Run of a trial: the order of its blocks, and the pairs that the report holds."""

from __future__ import annotations

from specdecode_worker.contract import Artifact, DraftConfig, DraftTrial, candidate_first
from specdecode_worker.drafts.swap import MAX_PAIRS, MAX_PAIRS_BYTES, BlockCosts, DraftGoal, TrialRun


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
