"""Which batches form when several tasks share a load, and what that means for the time of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.planning.acceptance import Bounds
from specdecode_operator.planning.estimates import TUNING, Batch
from specdecode_operator.planning.search import batches
from specdecode_worker.contract import TreeShape

DEEP_AND_PLAIN = (("code", TreeShape.chain(3)), ("prose", TreeShape.chain(0)))
EVEN = {"code": 0.5, "prose": 0.5}
EAGLE = Bounds(0, 7, 3, 16, 1)
BOTH = {"code": EAGLE, "prose": EAGLE}


def met(sequences: float) -> dict[tuple[str, int], float]:
    return {(one.task, one.batch.passes): one.weight for one in batches(DEEP_AND_PLAIN, BOTH, EVEN, sequences)}


def test_one_sequence_runs_its_own_shape() -> None:
    assert {one.batch for one in batches(DEEP_AND_PLAIN, BOTH, EVEN, 1)} == {Batch(3, 4.0), Batch(0, 1.0)}


def test_a_second_sequence_is_of_the_other_task_half_of_the_time() -> None:
    assert met(2) == pytest.approx({("code", 3): 1, ("prose", 3): 0.5, ("prose", 0): 0.5})


def test_a_parallel_draft_makes_one_pass_and_verifies_all_of_its_nodes() -> None:
    bounds = {"code": replace(EAGLE, methods=("peagle",)), "prose": EAGLE}
    assert {one.batch for one in batches(DEEP_AND_PLAIN, bounds, EVEN, 1)} == {Batch(1, 4.0), Batch(0, 1.0)}
    deep = (("code", TreeShape.chain(5)), ("prose", TreeShape.chain(2)))
    assert {(one.task, one.batch.passes) for one in batches(deep, bounds, EVEN, 1)} == {("code", 1), ("prose", 2)}


def test_passes_of_merged_drafts_add_up() -> None:
    bounds = {"code": replace(EAGLE, methods=("eagle3", "peagle")), "prose": EAGLE}
    assert {one.batch for one in batches(DEEP_AND_PLAIN, bounds, EVEN, 1)} == {Batch(4, 4.0), Batch(0, 1.0)}


def test_a_full_batch_holds_all_tasks() -> None:
    assert met(16) == pytest.approx({("code", 3): 1, ("prose", 3): 1})


@given(
    st.lists(st.tuples(st.integers(0, 7), st.floats(0.01, 1)), min_size=1, max_size=4),
    st.floats(1, 64),
)
def test_every_task_meets_something_and_nothing_shallower_than_itself(
    tasks: list[tuple[int, float]], sequences: float
) -> None:
    total = sum(share for _, share in tasks)
    shapes = tuple((str(index), TreeShape.chain(depth)) for index, (depth, _) in enumerate(tasks))
    shares = {str(index): share / total for index, (_, share) in enumerate(tasks)}
    weights: Counter[str] = Counter()
    for one in batches(shapes, dict.fromkeys(shares, EAGLE), shares, sequences):
        weights[one.task] += one.weight  # type: ignore[assignment]
        assert one.batch.passes >= dict(shapes)[one.task].depth
        assert TUNING.least_share <= one.weight <= 1 + 1e-9
        assert 1 <= one.batch.verified <= 1.05 + max(shape.nodes for _, shape in shapes)
    assert dict(weights) == pytest.approx(dict.fromkeys(shares, 1.0))
