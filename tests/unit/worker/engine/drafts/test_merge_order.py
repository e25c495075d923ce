"""Order of the candidates of merged drafts."""

from __future__ import annotations

from specdecode_worker.contract import MAX_RANKS
from specdecode_worker.drafts.registry import MOST_NODES, Candidate, Credit, MergeOrder

HEAD, LOOKUP = "head", "lookup"
MISS = MAX_RANKS


def record(order: MergeOrder, draft: str, ranks: list[int], *, task: str = "code", sampled: bool = False) -> None:
    order.record(task, Credit(draft, "hash", ranks), sampled=sampled)


def test_drafts_alternate_until_their_rates_are_known() -> None:
    order = MergeOrder().order("code", (HEAD, LOOKUP), sampled=False)
    assert order[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len(set(order)) == 2 * MAX_RANKS


def test_the_candidate_that_was_right_more_often_is_first() -> None:
    order = MergeOrder()
    for _ in range(30):
        record(order, HEAD, [0, MISS, 1])
        record(order, LOOKUP, [0, 0, -1])
    assert order.order("code", (HEAD, LOOKUP), sampled=False)[:2] == [Candidate(1, 0), Candidate(0, 0)]
    for task, sampled in (("code", True), ("chat", False)):
        assert order.order(task, (HEAD, LOOKUP), sampled=sampled)[0] == (0, 0), "rates are of one kind of requests"


def test_nodes_without_a_proposal_do_not_count() -> None:
    order = MergeOrder()
    for _ in range(100):
        record(order, LOOKUP, [-1, -1])
        record(order, HEAD, [MISS])
    assert order.order("code", (HEAD, LOOKUP), sampled=False)[0] == (1, 0)


def test_the_order_follows_the_traffic() -> None:
    order = MergeOrder()
    for _ in range(20 * int(MOST_NODES)):
        record(order, LOOKUP, [0])
        record(order, HEAD, [1])
    for _ in range(int(MOST_NODES)):
        record(order, LOOKUP, [MISS])
        record(order, HEAD, [0])
    assert order.order("code", (HEAD, LOOKUP), sampled=False)[0] == (0, 0)


def test_rates_of_removed_tasks_are_forgotten() -> None:
    order = MergeOrder()
    for _ in range(50):
        record(order, LOOKUP, [0])
        record(order, LOOKUP, [0], task="chat")
    order.retain(["chat"])
    assert order.order("code", (HEAD, LOOKUP), sampled=False)[0] == (0, 0)
    assert order.order("chat", (HEAD, LOOKUP), sampled=False)[0] == (1, 0)


def test_the_own_order_of_a_draft_holds() -> None:
    order = MergeOrder()
    for _ in range(100):
        record(order, HEAD, [1, 2])
    assert [rank for draft, rank in order.order("code", (HEAD, LOOKUP), sampled=False) if draft == 0] == list(
        range(MAX_RANKS)
    )
