"""Drafts that propose all depths in one pass: depth costs them only verification."""

from __future__ import annotations

import pytest

from specdecode_operator.planning.acceptance import bounds_of
from specdecode_worker.contract import Method, draft_passes
from support.operators.fleet import Truth, loop_over

CHANCES = [0.75] * 7
DEPTH = {"min": 0, "max": 7, "initial": 3}
METHODS: tuple[Method, ...] = ("eagle3", "peagle", "dflash")


def truth_of(method: Method) -> Truth:
    """Return a worker whose draft passes take 8 ms each, and a verified token 0.5 ms."""

    def seconds(sequences: float, depth: int, context: float) -> float:
        return 0.020 + 0.008 * draft_passes(method, depth) + 0.0005 * sequences * (depth + 1)

    return Truth(chances=CHANCES, step_time=seconds, method=method)


def per_token(truth: Truth, depth: int) -> float:
    tokens = sum(CHANCES[0] ** level for level in range(depth + 1))
    return truth.step_time(truth.sequences, depth, truth.context) / tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_parallel_draft_runs_deeper_than_one_with_a_pass_for_each_depth(method: Method) -> None:
    truth = truth_of(method)
    loop = loop_over(truth, explore=0.1, speculation={"method": method, "depth": DEPTH})
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
