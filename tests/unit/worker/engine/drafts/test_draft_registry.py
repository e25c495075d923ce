"""Registry of drafts: replacement, the states that the report shows, and the candidates and credit of merged drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdecode_worker.contract import MAX_RANKS, DraftState, MergedDraft, PendingDraft, TaskMatch, TreeShape
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.request import DraftProgress, Request
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.drafts.registry import (
    MOST_NODES,
    Candidate,
    Credit,
    CreditedDraft,
    DraftRegistry,
    MergeOrder,
    OwnRanks,
    StepProposals,
    TaskDrafts,
    first_distinct,
)
from specdecode_worker.drafts.swap import SwapStatus
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.trees import PLAIN, tree_of
from support.worker.small_engine import small_engine, submit


def loaded(draft_hash: str, name: str = "") -> LoadedDraft:
    drafter: Any = SimpleNamespace(reads=TargetStates(), columns=None, problem="")
    return LoadedDraft(drafter, DraftState(name=name, method="eagle3", hash=draft_hash))


def device_state() -> DeviceState:
    return DeviceState(2, 64, torch.float32, torch.device("cpu"))


def test_requests_restart_with_a_draft_of_the_same_hash() -> None:
    registry = DraftRegistry({"": loaded("h")}, device_state(), 8)
    requests: list[Any] = [SimpleNamespace(draft=DraftProgress(name), merged={}, cached=5) for name in ("h", "other")]
    registry.replace("", loaded("h"), requests)
    assert [request.draft.draft for request in requests] == ["", "other"]


def test_the_report_shows_swaps_of_known_and_new_drafts() -> None:
    registry = DraftRegistry({"": loaded("h"), "code": loaded("c", name="code")}, device_state(), 8)
    swaps = {
        "": SwapStatus(pending=PendingDraft(method="ngram", hash="ngram-2-5", since_seconds=3)),
        "new": SwapStatus(problem="fc.weight is missing"),
    }
    first = registry.reported("", swaps)
    assert (first.hash, first.pending and first.pending.hash) == ("h", "ngram-2-5")
    named = [(draft.name, draft.method, draft.swap_problem) for draft in registry.named(swaps)]
    assert named == [("code", "eagle3", None), ("new", "none", "fc.weight is missing")]
    assert registry.reported() == registry.state()


def test_each_plan_sets_the_requests_that_a_draft_serves() -> None:
    engine = small_engine()
    registry = engine._drafts
    drafter: Any = registry.paged[""]
    registry.replace("code", loaded("c", name="code"), ())
    chat, code = (Request.of(submit(task=task), (), arrived_seconds=0.0) for task in ("chat", "code"))
    own = (TaskMatch(name="code", draft="code"),)
    for tasks, served in (((), [True, True]), (own, [True, False]), ((), [True, True])):
        registry.set_tasks(tasks)
        assert [drafter.serves(one) for one in (chat, code)] == served
        assert drafter.progress(chat) is chat.draft


MISS = MAX_RANKS
HEAD, LOOKUP = CreditedDraft("", "h", 0), CreditedDraft("lookup", "l", 1)
DRAFTS = ("head", "lookup")


def test_equal_tokens_are_one_candidate() -> None:
    tokens = torch.tensor([[5, 5, -1, 7, 5, 2], [-1, -1, -1, -1, -1, 9], [1, 2, 3, 4, 5, 6], [-1] * 6])
    assert first_distinct(tokens, 3).tolist() == [[5, 7, 2], [9, -1, -1], [1, 2, 3], [-1, -1, -1]]


def own_ranks() -> OwnRanks:
    ranked = torch.full((2, 2, 4, MAX_RANKS), -1)
    ranked[0, 1, 0, :2] = torch.tensor([11, 12])
    ranked[0, 1, 2, :2] = torch.tensor([21, 22])
    ranked[1, 1, 0, :2] = torch.tensor([12, 13])
    ranked[1, 1, 2, :1] = torch.tensor([30])
    return OwnRanks({0: (), 1: (HEAD, LOOKUP)}, ranked)


@pytest.mark.parametrize(
    ("tokens", "path", "limit", "wanted"),
    [
        ([12, 21, 4], [2, 3], 2, ([1, 0, -1], [0, MISS, -1])),
        ([12], [], 2, ([1], [0])),
        ([13], [], 2, ([MISS], [1])),
        ([12, 21], [2], 1, ([1, MISS], [0, MISS])),
        ([12], [], 0, ([MISS], [MISS])),
    ],
    ids=["path", "root", "one draft", "cut", "cut at the root"],
)
def test_a_node_counts_for_each_draft_that_proposed_it(
    tokens: list[int], path: list[int], limit: int, wanted: tuple[list[int], list[int]]
) -> None:
    credits = own_ranks().credit(1, path, tokens, [0] * len(tokens), limit)
    assert [(one.draft, one.hash) for one in credits] == [("", "h"), ("lookup", "l")]
    assert tuple(one.ranks for one in credits) == wanted
    assert own_ranks().credit(0, path, tokens, [0] * len(tokens), limit) == ()


def test_a_draft_that_proposed_alone_has_the_ranks_of_the_row() -> None:
    alone = OwnRanks({0: (LOOKUP,)}, None)
    assert [(one.hash, list(one.ranks)) for one in alone.credit(0, [1, 0], [4, 9], [0, MISS, -1], 5)] == [
        ("l", [0, MISS])
    ]


def task_drafts(*names: str, merges: bool = True) -> TaskDrafts:
    """Return the drafts of tasks, of which those with these names can run; "trees" has a process of its own."""
    drafts: Any = {name: SimpleNamespace(drafter=SimpleNamespace(own_process=name == "trees")) for name in names}
    return TaskDrafts(drafts, merges=merges)


def test_tasks_merge_drafts_that_can_run() -> None:
    tasks = task_drafts("", "head", "lookup")
    merge = tuple(MergedDraft(draft=name) for name in ("lookup", "head"))
    tasks.set_tasks([TaskMatch(name="a", draft="head", merge=merge), TaskMatch(name="b", draft="gone", merge=merge[:1]),
                     TaskMatch(name="c", merge=(MergedDraft(draft="gone"),))])  # fmt: skip
    assert [tasks.name(task) for task in "abcd"] == ["head", "", "", ""]
    assert [[one.draft for one in tasks.merged(task)] for task in "abcd"] == [["lookup"], ["lookup"], [], []]
    assert [tasks.serves("lookup", task) for task in "abcd"] == [True, True, False, False]
    tasks = task_drafts("lookup")
    tasks.set_tasks([TaskMatch(name="a", merge=merge[:1])])
    assert (tasks.name("a"), tasks.merged("a"), tasks.serves("lookup", "a")) == ("", (), False), "nothing to merge with"
    one = task_drafts("", "head", "lookup", merges=False)
    one.set_tasks([TaskMatch(name="a", merge=merge)])
    assert (one.merges, one.merged("a")) == (False, ()), "its sampler verifies one draft"


def test_the_drafts_of_a_task_are_looked_up_once_for_all_its_rows() -> None:
    """Rows with a tree have the drafts that are ready, the others all that must know of their tokens."""
    tasks, asked = task_drafts("", "lookup"), []
    tasks.set_tasks([TaskMatch(name="a", merge=(MergedDraft(draft="lookup"),))])
    names = tasks.names
    tasks.names = lambda task: asked.append(task) or names(task)  # type: ignore[method-assign, func-returns-value]
    request = SimpleNamespace(submit=SimpleNamespace(task="a"), proposers=("lookup",))
    rows: Any = [SimpleNamespace(request=request, tree=tree) for tree in (PLAIN, tree_of(TreeShape.chain(2)), PLAIN)]
    both = ("", "lookup")
    assert StepProposals({}, tasks, None).proposers(rows) == [both, ("lookup",), both]  # type: ignore[arg-type]
    assert asked == ["a"]


def test_a_draft_of_whole_trees_is_not_merged() -> None:
    """Such as one on a device of its own."""
    tasks = task_drafts("", "lookup", "trees")
    merge = (MergedDraft(draft="lookup"), MergedDraft(draft="trees"))
    tasks.set_tasks([TaskMatch(name="a", merge=merge), TaskMatch(name="b", draft="trees", merge=merge[:1])])
    assert [one.draft for one in tasks.merged("a")] == ["lookup"]
    assert tasks.merged("b") == ()


def record(order: MergeOrder, draft: str, ranks: list[int], *, task: str = "code", sampled: bool = False) -> None:
    order.record(task, Credit(draft, "hash", ranks), sampled=sampled)


def test_drafts_alternate_until_their_rates_are_known() -> None:
    order = MergeOrder().order("code", DRAFTS, sampled=False)
    assert order[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len(set(order)) == 2 * MAX_RANKS


def test_the_candidate_that_was_right_more_often_is_first() -> None:
    order = MergeOrder()
    for _ in range(30):
        record(order, "head", [0, MISS, 1])
        record(order, "lookup", [0, 0, -1])
    assert order.order("code", DRAFTS, sampled=False)[:2] == [Candidate(1, 0), Candidate(0, 0)]
    for task, sampled in (("code", True), ("chat", False)):
        assert order.order(task, DRAFTS, sampled=sampled)[0] == (0, 0), "rates are of one kind of requests"


def test_nodes_without_a_proposal_do_not_count() -> None:
    order = MergeOrder()
    for _ in range(100):
        record(order, "lookup", [-1, -1])
        record(order, "head", [MISS])
    assert order.order("code", DRAFTS, sampled=False)[0] == (1, 0)


def test_the_order_follows_the_traffic() -> None:
    order = MergeOrder()
    for _ in range(20 * int(MOST_NODES)):
        record(order, "lookup", [0])
        record(order, "head", [1])
    for _ in range(int(MOST_NODES)):
        record(order, "lookup", [MISS])
        record(order, "head", [0])
    assert order.order("code", DRAFTS, sampled=False)[0] == (0, 0)


def test_rates_of_removed_tasks_are_forgotten() -> None:
    order = MergeOrder()
    for _ in range(50):
        record(order, "lookup", [0])
        record(order, "lookup", [0], task="chat")
    order.retain(["chat"])
    assert order.order("code", DRAFTS, sampled=False)[0] == (0, 0)
    assert order.order("chat", DRAFTS, sampled=False)[0] == (1, 0)


def test_the_own_order_of_a_draft_holds() -> None:
    order = MergeOrder()
    for _ in range(100):
        record(order, "head", [1, 2])
    assert [rank for draft, rank in order.order("code", DRAFTS, sampled=False) if draft == 0] == list(range(MAX_RANKS))
