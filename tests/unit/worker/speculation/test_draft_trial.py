"""Schedule of a trial: the order of its blocks, and the pairs that the report holds."""

from __future__ import annotations

from specdecode_worker.contract import Artifact, DraftTrial, candidate_first
from specdecode_worker.drafts.swap import MAX_PAIRS, MAX_PAIRS_BYTES, BlockCosts, TrialSchedule


def trial(**fields: int) -> DraftTrial:
    return DraftTrial(id="t", candidate=Artifact(uri="file:///c", hash="c"), pod="p", **fields)


def run_block(schedule: TrialSchedule, cells: int = 1) -> None:
    """Run one block that costs 1 s in each cell for the incumbent and 2 s for the candidate."""
    block = schedule.new_block()
    seconds = 2.0 if schedule.is_candidates_turn else 1.0
    for index in range(cells):
        block.admit(f"r{index}")
        block.add_row(f"r{index}", f"task-{index}", 1)
    block.end_step(0, 0, seconds)
    schedule.end_block(block)


def test_every_pair_runs_both_drafts_in_the_order_of_its_coin() -> None:
    schedule = TrialSchedule(trial(first_pair=5))
    orders = []
    for index in range(5, 25):
        assert (schedule.pair, schedule.is_between_pairs) == (index, True)
        order = [schedule.is_candidates_turn]
        run_block(schedule)
        assert not schedule.is_between_pairs
        order.append(schedule.is_candidates_turn)
        run_block(schedule)
        assert order == [candidate_first("t", index), not candidate_first("t", index)]
        orders.append(order[0])
        newest = schedule.pairs[-1]
        assert newest.index == index
        assert [[cost.sequence_seconds for cost in side] for side in (newest.incumbent, newest.candidate)] == [[1], [2]]
    assert set(orders) == {True, False}, "both orders occur"
    assert [pair.index for pair in schedule.pairs] == list(range(25 - MAX_PAIRS, 25))


def test_the_pairs_fit_into_the_report_and_the_newest_is_always_there() -> None:
    schedule = TrialSchedule(trial())
    for _ in range(2 * MAX_PAIRS):
        run_block(schedule, cells=40)
    sizes = [len(pair.model_dump_json()) for pair in schedule.pairs]
    assert 1 <= len(sizes) < MAX_PAIRS
    assert sum(sizes) <= MAX_PAIRS_BYTES
    assert schedule.pairs[-1].index == schedule.pair - 1


def test_a_block_has_the_size_that_the_trial_says_and_pairs_counted_elsewhere_are_skipped() -> None:
    schedule = TrialSchedule(trial(block_requests=1))
    run_block(schedule)
    schedule.trial = trial(block_requests=2, first_pair=7)
    block: BlockCosts = schedule.new_block()
    block.admit("a")
    block.end_request("a", emitted=True)
    assert not block.is_complete
    schedule.end_block(block)
    assert schedule.pair == 7
