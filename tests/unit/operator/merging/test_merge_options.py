"""Time per token of every subset of the drafts of a task, from any counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.merging.credit import COMMON
from specdecode_operator.merging.options import Option, Present, options_of
from specdecode_operator.merging.subsets import Credit, TaskDrafts, subsets_of
from specdecode_operator.merging.texts import gain_text, listed
from specdecode_operator.planning.acceptance_model import AcceptanceModel
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.step_time_model import StepTimeModel
from specdecode_operator.planning.task_bounds import Bounds
from specdecode_operator.planning.workload import tasks_at
from specdecode_operator.state.learned import CreditCell, LearnedState, RowState
from specdecode_worker.contract import TreeShape
from support.operators.estimates import FULL, chances, spec

TASK = "other"
DRAFTS = TaskDrafts(TASK, "o", {"lookup": "l", "head": "h"}, {"lookup": 6})
RUNNING = ("lookup", "head")
SPEC = spec(tree={"topK": 4, "maxNodes": 16})
SHAPES = [TreeShape.parse(text) for text in ("none", "chain:3", "tree:3,2,1", "tree:2,2")]


def options(cells: list[CreditCell], shape: TreeShape = SHAPES[1]) -> list[Option]:
    learned = LearnedState(acceptance=chances(0.6), costs=FULL, credit=tuple(cells))
    times, load = StepTimeModel.fit(FULL), Load(4, 500)
    assert times is not None
    row = RowState(concurrency=2, context=0, task=TASK, depth=0).running(shape)
    tasks = tasks_at(AcceptanceModel(learned, SPEC), [row], load, None)
    present = Present(times, load, tasks, ((TASK, shape),))
    bounds = {
        names: Bounds(0, 5, 3, 16, 4, ("eagle3", "eagle3") if "head" in names else ("eagle3",))
        for names in subsets_of(RUNNING)
    }
    return options_of(learned, present, Credit.of(learned, DRAFTS, RUNNING), bounds)


def counts(draft: str, *rates: float, total: float = 4000) -> list[CreditCell]:
    return [
        CreditCell(task=TASK, draft=draft, depth=depth, hits=rate * total, total=total, at=1000)
        for depth, rate in enumerate(rates, start=1)
    ]


def by_name(result: list[Option]) -> dict[tuple[str, ...], Option]:
    return {option.names: option for option in result}


def test_a_head_without_credit_costs_its_passes_and_no_tokens() -> None:
    credit = [*counts(COMMON, 0.7, 0.7, 0.7), *counts("o", 0.5, 0.5, 0.5), *counts("h", 0, 0, 0)]
    result = by_name(options([*credit, *counts("l", 0.3, 0.3, 0.3)]))
    assert result[RUNNING] == Option(RUNNING, 0.0, 0.0, 1.0, 1.0)
    lookup = result["lookup",]
    assert lookup.tokens == pytest.approx(1, abs=0.01)
    assert lookup.seconds < 0.9
    assert lookup.bound > 0.05
    assert result["head",].bound < lookup.bound
    assert result[()].tokens < 0.9
    text = gain_text(("head",), "dropped", lookup, lookup.confidence)
    assert text.startswith("head dropped: +0 % tokens for ")
    assert text.endswith(" % longer steps, 100 % sure")


def test_a_head_with_much_credit_is_worth_its_passes() -> None:
    credit = [*counts(COMMON, 0.9, 0.9, 0.9), *counts("o", 0.3, 0.3, 0.3), *counts("h", 0.85, 0.85, 0.85)]
    result = by_name(options([*credit, *counts("l", 0.05, 0.05, 0.05)]))
    assert result["lookup",].gain < -0.1
    assert result["head",].gain > -0.1


def test_names_are_listed_in_one_phrase() -> None:
    assert [listed(names) for names in ((), ("a",), ("a", "b"))] == ["nothing", "a", "a and b"]


amounts = st.floats(0, 1e6)
cells = st.lists(
    st.builds(
        CreditCell,
        task=st.just(TASK),
        draft=st.sampled_from([COMMON, "o", "h", "l"]),
        depth=st.integers(1, 6),
        hits=amounts,
        total=amounts,
        at=amounts,
        parent=st.sampled_from(["main", "sibling"]),
        ranks=st.lists(amounts, max_size=3).map(tuple),
    ),
    max_size=10,
)


@given(cells, st.sampled_from(SHAPES))
@settings(max_examples=60)
def test_any_counts_give_finite_options_and_the_same_ones_again(drawn: list[CreditCell], shape: TreeShape) -> None:
    result = options(drawn, shape)
    assert [option.names for option in result] == subsets_of(RUNNING)
    assert all(math.isfinite(value) for one in result for value in (one.gain, one.error, one.tokens, one.seconds))
    assert all(0 <= one.confidence <= 1 and one.error >= 0 for one in result)
    assert options(drawn, shape) == result
