"""The recorder, which turns the results of a step into counters. The tests advance the requests themselves."""

from __future__ import annotations

import pytest
from msgspec import structs

from specdecode_worker.contract import MAX_DEPTH, MAX_RANKS, TreeShape
from specdecode_worker.core.request import Request, Row
from specdecode_worker.engine.stats import RowResult, Statistics, StepRecorder
from specdecode_worker.sampling.trees import PLAIN, Tree, tree_of
from support.worker.small_engine import request

CHAIN = tree_of(TreeShape.chain(2))
WIDE = tree_of(TreeShape.levels(2, 1))


def recorder() -> StepRecorder:
    return StepRecorder(Statistics())


def walk(
    into: StepRecorder, one: Request, tree: Tree, tokens: list[int], ranks: list[int], path: list[int], **read: object
) -> None:
    """Process a row as the engine does: advance the request, append its tokens, then call the recorder."""
    fields = {"ranked_NK": None, "depth_limit": 99, **read}
    one.cached += len(tokens)
    taken = one.append_output(tokens)
    into.record_row(Row(one, tree.verified, tree), RowResult(tokens, path, ranks, **fields), taken, now=6.0)  # type: ignore[arg-type]


def cells(of: StepRecorder) -> dict[tuple[int, str], dict[int, int]]:
    """Return the acceptance counts as {(depth, parent): {rank: count}}."""
    return {
        (cell.depth, cell.parent): {rank: count for rank, count in enumerate(cell.ranks) if count}
        for cell in of.statistics.acceptance_cells(1000)
    }


def test_ranks_are_counted_by_depth_and_parent() -> None:
    into, one = recorder(), request()
    walk(into, one, WIDE, [5, 6, 7], ranks=[1, 0, -1], path=[2, 4])
    assert cells(into) == {(1, "main"): {1: 1}, (2, "sibling"): {0: 1}}
    walk(into, one, WIDE, [5, 6], ranks=[0, MAX_RANKS, -1], path=[1, -1])
    assert cells(into)[1, "main"] == {0: 1, 1: 1}
    assert cells(into)[2, "main"] == {MAX_RANKS: 1}


def test_first_tokens_are_counted_by_the_context_of_the_step() -> None:
    """A plain row whose first token was ranked, for a shadow draft, counts as a verified one."""
    into, one = recorder(), request()
    for context, rank in ((0, 0), (0, 1), (2, 0)):
        into.context = context
        walk(into, one, CHAIN, [5], ranks=[rank, -1], path=[-1, -1])
    walk(into, one, tree_of(TreeShape.chain(0), 2), [6], ranks=[0], path=[], ranked_NK=[[6, 8], [9, 1], [-1, -1]])
    walk(into, one, PLAIN, [7], ranks=[-1], path=[])
    found = {cell.context: (cell.hits, cell.total) for cell in into.statistics.context_cells(1000)}
    assert found == {0: (1, 2), 2: (2, 2)}


def test_all_depths_below_a_sibling_count_as_sibling() -> None:
    into, one = recorder(), request()
    walk(into, one, tree_of(TreeShape.levels(2, 1, 1)), [5, 6, 7, 8], ranks=[1, 0, 0, -1], path=[2, 4, 6])
    assert set(cells(into)) == {(1, "main"), (2, "sibling"), (3, "sibling")}


def test_depths_that_no_report_has_are_not_counted() -> None:
    into, one = recorder(), request(max_tokens=40)
    chain = tree_of(TreeShape.chain(MAX_DEPTH + 2))
    walk(into, one, chain, [5] * (MAX_DEPTH + 3), ranks=[0] * (MAX_DEPTH + 2) + [-1], path=[*range(1, MAX_DEPTH + 3)])
    assert {depth for depth, _ in cells(into)} == {*range(1, MAX_DEPTH + 1)}


def test_tokens_dropped_by_a_stop_are_not_counted() -> None:
    into, one = recorder(), request(stop_token_ids=(6,))
    walk(into, one, CHAIN, [6, 7, 8], ranks=[0, 0, -1], path=[1, 2])
    assert cells(into) == {(1, "main"): {0: 1}}
    assert into.statistics.traffic("other").output_tokens == 1


def test_first_token_of_a_prompt_is_not_a_decoding_step() -> None:
    into, one = recorder(), request()
    one.cached = 3
    into.record_row(Row(one, 3, start=0), RowResult([5], [], [-1], None, 0), one.append_output([5]), now=5.5)
    statistics = into.statistics
    traffic = statistics.traffic("other")
    assert (traffic.drafts, statistics.plain_steps, traffic.output_tokens) == (0, 0, 1)
    assert statistics.ttft.sum == pytest.approx(0.5)
    assert sum(statistics.itl.counts) == 0


def test_tokens_of_a_step_share_its_time() -> None:
    into, one = recorder(), request()
    walk(into, one, PLAIN, [5], ranks=[-1], path=[])
    one.last_emit_seconds = 5.1
    walk(into, one, CHAIN, [5, 6, 7], ranks=[0, 0, -1], path=[1, 2])
    statistics = into.statistics
    assert sum(statistics.ttft.counts) == 1
    assert sum(statistics.itl.counts) == 3
    assert statistics.itl.sum == pytest.approx(0.9)


SHADOWED = tree_of(TreeShape.chain(1), 4)
"""Tree with one verified node and three shadow nodes.

The draft ranked candidates after the root and nodes 1 to 3.
"""
RANKED = [[1, 9], [2, 9], [3, 9], [8, 4], [-1, -1]]


def test_shadow_nodes_are_scored_without_verification_when_their_tokens_are_known() -> None:
    into, one = recorder(), request(prompt=(0, 0))
    one.cached = 1
    walk(into, one, SHADOWED, [1, 2], ranks=[0, 0], path=[1], ranked_NK=RANKED)
    assert cells(into) == {(1, "main"): {0: 1}, (2, "main"): {0: 1}}
    walk(into, one, PLAIN, [3], ranks=[-1], path=[])
    assert (3, "main") not in cells(into), "the path's end is not known yet"
    walk(into, one, PLAIN, [4], ranks=[-1], path=[])
    assert cells(into) == {(d, "main"): {r: 1} for d, r in ((1, 0), (2, 0), (3, 0), (4, 1))}
    walk(into, one, PLAIN, [5], ranks=[-1], path=[])
    assert sum(sum(ranks.values()) for ranks in cells(into).values()) == 4, "scored once"


def test_shadow_nodes_of_an_ended_request_are_dropped() -> None:
    into, one = recorder(), request(prompt=(0, 0))
    one.cached = 1
    walk(into, one, SHADOWED, [1, 2], ranks=[0, 0], path=[1], ranked_NK=RANKED)
    one.finish = "abort"
    into.record_end(one, 7.0)
    again = request(prompt=(0, 0))
    again.tokens += [1, 2, 3]
    walk(into, again, PLAIN, [4], ranks=[-1], path=[])
    assert set(cells(into)) == {(1, "main"), (2, "main")}


def test_queue_time_is_recorded_once_despite_a_preemption_before_the_first_token() -> None:
    into, one = recorder(), request()
    into.record_admission(one, 5.2)
    one.forget_cache()
    into.record_admission(one, 9.0)
    assert sum(into.statistics.queue.counts) == 1
    assert into.statistics.queue.sum == pytest.approx(0.2)


@pytest.mark.parametrize(("finish", "counted"), [("stop", 1), ("length", 1), ("abort", 0), ("error", 0)])
def test_only_completed_requests_count_as_finished(finish: str, counted: int) -> None:
    into, one = recorder(), request()
    into.record_arrival(one)
    one.accepted, one.drafts, one.finish = 7, 3, finish  # type: ignore[assignment]
    into.record_end(one, 6.0)
    traffic = into.statistics.traffic("other")
    assert (traffic.arrivals, traffic.prompt_tokens, traffic.finished) == (1, 3, counted)
    assert [(cell.n, cell.a, cell.d) for cell in into.statistics.request_cells()] == [(1, 7, 3)] * counted
    assert sum(into.statistics.e2e.counts) == counted


def test_latency_and_tokens_per_step_are_counted_by_task() -> None:
    into = recorder()
    for task, steps in (("code", 2), ("chat", 1)):
        one = Request.of(structs.replace(request().submit, task=task), (), arrived_seconds=5.0)
        walk(into, one, PLAIN, [5], ranks=[-1], path=[])
        for _ in range(steps):
            walk(into, one, CHAIN, [5, 6, 7], ranks=[0, 0, -1], path=[1, 2])
    cells = {cell.task: cell for cell in into.statistics.task_cells()}
    assert {task: (cell.decode_steps, cell.decode_tokens) for task, cell in cells.items()} == {
        "code": (3, 7),
        "chat": (2, 4),
    }
    assert {task: (sum(cell.ttft.counts), sum(cell.itl.counts)) for task, cell in cells.items()} == {
        "code": (1, 6),
        "chat": (1, 3),
    }
    assert cells["code"].ttft.sum == pytest.approx(1.0)
    assert sum(into.statistics.ttft.counts) == 2
    assert sum(into.statistics.itl.counts) == 9
