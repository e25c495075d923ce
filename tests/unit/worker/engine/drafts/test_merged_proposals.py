"""Candidates of several drafts behind one node, the credit of each draft, and the drafts of a task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdecode_worker.contract import MAX_RANKS, MergedDraft, TaskMatch, TreeShape
from specdecode_worker.drafts.registry import CreditedDraft, OwnRanks, StepProposals, TaskDrafts, first_distinct
from specdecode_worker.sampling.trees import PLAIN, tree_of

MISS = MAX_RANKS
HEAD, LOOKUP = CreditedDraft("", "h", 0), CreditedDraft("lookup", "l", 1)


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
