"""Trees by survival, the joint choice of all tasks' trees against trying every one of them, and their batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.planning.acceptance import (
    AcceptanceModel,
    Bounds,
    Objective,
    Path,
    TaskAcceptance,
    TaskLoad,
    paths_of,
    positions,
    shape_of,
    task_acceptance,
    tasks_at,
)
from specdecode_operator.planning.estimates import TUNING, Batch, Estimate, Load, StepTimeModel, features
from specdecode_operator.planning.search import ShapeSearch, batches
from specdecode_operator.state.learned import AcceptanceCell, LearnedState, RowState, StepTimeCell
from specdecode_worker.contract import Plan, TreeShape
from support.operators.estimates import FULL, chances, cost, moments, spec

LEVEL = (Estimate(0.6, 0.01), Estimate(0.2, 0.01), Estimate(0.1, 0.01))
RATES = TaskAcceptance((LEVEL,) * 4, ((Estimate(0.5, 0.02), Estimate(0.1, 0.02), Estimate(0.05, 0.02)),) * 4)

ranked = st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2).map(lambda p: sorted(p, reverse=True))
levels = st.lists(ranked, min_size=2, max_size=2).map(
    lambda found: tuple(tuple(Estimate(p / 2, 0.0) for p in level) for level in found)
)


def test_expected_tokens_and_their_slopes() -> None:
    shape = TreeShape((0, 0, 1, 1, 2))
    assert RATES.tokens(TreeShape.chain(2)) == pytest.approx(1 + 0.6 + 0.36)
    assert RATES.tokens(shape) == pytest.approx(1 + 0.6 + 0.2 + 0.36 + 0.12 + 0.2 * 0.5)
    found = RATES.slopes(shape)
    assert found.keys() == {position for path in paths_of(shape) for position in positions(path)}
    nudged = TaskAcceptance(((Estimate(0.6 + 1e-6, 0), *LEVEL[1:]), *RATES.main[1:]), RATES.sibling)
    slope = (math.log(nudged.tokens(shape)) - math.log(RATES.tokens(shape))) / 1e-6
    assert found[1, True, 0] == pytest.approx(slope, rel=1e-4)


@given(st.integers(0, 4), st.integers(1, 3), st.integers(0, 40))
def test_every_prefix_of_the_best_nodes_is_a_tree_and_survival_falls(depth: int, top_k: int, most: int) -> None:
    nodes = RATES.best_nodes(depth, top_k, most)
    assert [node.survival for node in nodes] == sorted((node.survival for node in nodes), reverse=True)
    for count in range(len(nodes) + 1):
        shape = shape_of(frozenset(node.path for node in nodes[:count]))
        assert (shape.nodes, shape.depth <= depth, max(shape.ranks) < top_k) == (count, True, True)
        assert set(paths_of(shape)) == {node.path for node in nodes[:count]}


def test_ranks_are_learnt_and_never_rise() -> None:
    seen = tuple(
        AcceptanceCell(task="other", depth=d, hits=400, total=1000, at=0, ranks=(300.0, 200.0, 250.0)) for d in (1, 2)
    )
    found = task_acceptance(LearnedState(acceptance=seen), None, 2, 4)
    assert [rate.mean for rate in found.main[0]] == pytest.approx([0.4, 0.3, 0.2, 0.2], abs=0.01)
    assert found.sibling[1][0].mean == pytest.approx(0.4, abs=0.05), "what was never seen leans on the main path"
    assert found.sibling[1][0].variance > 10 * found.main[1][0].variance


# --- the joint choice ---------------------------------------------------------------------------------------------


def trees(depth: int, top_k: int) -> Iterator[tuple[Path, ...]]:
    """Every tree of at most this depth and width."""
    paths = [path for level in range(1, depth + 1) for path in product(range(top_k), repeat=level)]
    for count in range(len(paths) + 1):
        for found in combinations(paths, count):
            inside = set(found)
            if all((p[:-1] in inside or len(p) == 1) and (not p[-1] or (*p[:-1], p[-1] - 1) in inside) for p in found):
                yield found


ALL = [shape_of(frozenset(found)) for found in trees(2, 2)]
times = StepTimeModel.fit(FULL)


@settings(max_examples=60)
@given(levels, levels, levels, st.floats(1.5, 12), st.integers(0, 1))
def test_the_joint_choice_is_the_best_of_all(
    one: object, two: object, beside: object, sequences: float, n: int
) -> None:
    """Two tasks of equal share: 33 x 33 pairs of trees, and no pair beats what was found."""
    bounds = Bounds(0, 2, 0, 6, 2)
    known = (TaskAcceptance(one, beside), TaskAcceptance(two, beside))  # type: ignore[arg-type]
    tasks = tuple(TaskLoad(name, bounds, rate, share=0.5, demand=0.5) for name, rate in zip("ab", known, strict=True))
    load = Load(sequences, 500, n)
    search = ShapeSearch(times, load, tasks, Objective())
    seconds = {
        (passes, verified): times.mean(load, Batch(passes, verified))
        for passes in range(3)
        for verified in {1 + (one.nodes + two.nodes) / 2 for one, two in product(ALL, ALL)}
    }

    def per_token(*shapes: TreeShape) -> float:
        tokens = sum(rate.tokens(shape) for rate, shape in zip(known, shapes, strict=True)) / 2
        verified = 1 + sum(shape.nodes for shape in shapes) / 2
        return seconds[max(shape.depth for shape in shapes), verified] / tokens

    best = min(per_token(*pair) for pair in product(ALL, ALL))
    found = min(per_token(*(shape for _, shape in shapes)) for shapes in search.best_by_depth())
    assert found == pytest.approx(best, rel=1e-9)


def search_of(learned: LearnedState, kv_tokens: float | None = None, **bounds: Any) -> ShapeSearch:
    model = AcceptanceModel(learned, spec(**{"tree": {"topK": 2, "maxNodes": 12}, **bounds}))
    rows, load = [RowState(concurrency=2, context=0, task="other", depth=3)], Load(4, 500)
    fitted = StepTimeModel.fit(learned.costs)
    return ShapeSearch(fitted, load, tasks_at(model, rows, load, kv_tokens), Objective())


def test_what_the_best_shape_has_is_worth_its_price_and_what_it_lacks_is_not() -> None:
    """A node's price is the time that it takes over the time that a token is worth, (dt/dN) E / t. On a line of step
    times, at the best shape, every node survives at least that, and every other one less."""
    learned = LearnedState(
        acceptance=tuple(cell.model_copy(update={"ranks": (150.0,)}) for cell in chances(0.6)), costs=FULL
    )
    search = search_of(learned)
    choices = search.evaluate(search.best_by_depth())
    best = min(choices.values(), key=lambda choice: choice.per_token)
    shape, task = best.shapes[0][1], search.tasks[0]
    slope = search.times.linear((0.0, 0.0, 4.0, 0.0, 0.0, 0.0))
    price = slope * best.tokens / best.seconds.mean
    assert 0 < price < 1
    nodes = task.acceptance.best_nodes(shape.depth, 2, 12)
    inside = set(paths_of(shape))
    assert 2 < len(inside) < 12, shape
    assert min(node.survival for node in nodes if node.path in inside) > 0.95 * price
    assert max(node.survival for node in nodes if node.path not in inside) < 1.05 * price


def test_the_cache_bounds_the_nodes() -> None:
    search = search_of(LearnedState(acceptance=chances(0.9), costs=FULL), kv_tokens=4 * (500 + 2 * 3))
    assert max(shapes[0][1].nodes for shapes in search.best_by_depth()) == 3


def test_what_the_spec_asks_for_counts_against_the_nodes() -> None:
    """Siblings at the first depth are likelier than the deep nodes of the least chain."""
    seen = tuple(cell.model_copy(update={"ranks": (600.0,)}) for cell in chances(0.3))
    bounds: dict[str, Any] = {"depth": {"min": 3, "max": 5}, "tree": {"topK": 2, "maxNodes": 5}}
    search = search_of(LearnedState(acceptance=seen, costs=FULL), **bounds)
    found = [step[1].path for step in search._by_survival(3)]
    assert len(found) == 2, found
    assert all(shapes[0][1].nodes <= 5 for shapes in search.best_by_depth())


# --- step times that bend over tokens -----------------------------------------------------------------------------


def of_experts(sequences: float, passes: int, verified: float) -> float:
    """Seconds of a step of 16 experts in each layer, of which few tokens read few (Llama 4 Scout on an H200)."""
    chosen = 16 * (1 - math.pow(15 / 16, sequences * verified))
    return 0.005 + 0.00135 * chosen + 0.000226 * passes


def of_dense_layers(sequences: float, passes: int, verified: float) -> float:
    """Seconds of a step whose tokens are free until arithmetic takes longer than reading weights (8B on an H200)."""
    tokens = sequences * verified
    return 0.001 + math.cbrt(0.00326**3 + (0.0000221 * tokens) ** 3) + 0.0003 * passes


def of_a_noisy_machine(sequences: float, passes: int, verified: float) -> float:
    """Seconds of a step on a straight line, of which the machine's other work takes a third more or less."""
    tokens = sequences * verified
    return (0.03 + 0.003 * passes + 0.001 * tokens) * Random(f"{tokens} {passes}").lognormvariate(0, 0.3)


def timed_before_serving(seconds: Callable[[float, int, float], float]) -> tuple[StepTimeCell, ...]:
    """Return what a worker times before it serves: plain steps, the timed shapes of a plan, at the edges of loads."""
    kinds = dict[tuple[int, int], StepTimeCell]()
    shapes = Plan(uid="u", max_depth=7, top_k=4, explore=0.05).timed_shapes
    for sequences, shape in product((1, 2, 4, 8, 16, 32), (TreeShape.chain(0), *shapes)):
        x = features(Load(sequences, 20), shape.depth, 1 + shape.nodes)
        cell = cost(sequences, shape.depth, 0.01)
        values = moments(x, seconds(sequences, shape.depth, 1 + shape.nodes), 12).values
        key = 1 << math.ceil(math.log2(x[2])), shape.depth
        if key not in kinds:
            kinds[key] = cell.model_copy(update={"tokens_bucket": key[0], "values": values, "made_up": 12})
    return tuple(kinds.values())


@pytest.mark.parametrize("seconds", [of_experts, of_dense_layers])
def test_times_that_bend_over_tokens_are_extrapolated_from_what_was_timed_before_serving(
    seconds: Callable[[float, int, float], float],
) -> None:
    """Wide trees were not timed. On a straight line, 16 nodes on experts are twice too cheap at one sequence."""
    fitted = StepTimeModel.fit(timed_before_serving(seconds))
    for sequences, batch in product((1, 3, 6, 12), (Batch(0, 1), Batch(2, 3), Batch(3, 9), Batch(5, 17))):
        found = fitted.predict(Load(sequences, 20), [batch])[batch]
        assert found.mean == pytest.approx(seconds(sequences, *batch), rel=0.1), (sequences, batch)


def test_step_times_that_wander_do_not_bend_the_line() -> None:
    """Bends that follow noise let a tree seem as fast as a smaller one, until it runs."""
    fitted = StepTimeModel.fit(timed_before_serving(of_a_noisy_machine), wander=0.09)
    four, twelve, twenty = (fitted.linear(features(Load(1, 20), 2, verified)) for verified in (4, 12, 20))
    assert twenty - twelve == pytest.approx(twelve - four, rel=0.05)


def test_on_experts_a_short_chain_is_best_alone_and_a_wide_tree_in_a_large_batch() -> None:
    """A token reads further experts at one sequence; at twelve all experts are read whatever is drafted."""
    rates = (Estimate(0.7, 0.001), Estimate(0.15, 0.001), Estimate(0.05, 0.001), Estimate(0.03, 0.001))
    known, fitted = TaskAcceptance((rates,) * 7, (rates,) * 7), StepTimeModel.fit(timed_before_serving(of_experts))
    tasks = (TaskLoad("other", Bounds(0, 7, 3, 16, 4), known, share=1, demand=1),)
    for sequences in (1, 12):
        search = ShapeSearch(fitted, Load(sequences, 20), tasks, Objective())
        shape = min(search.evaluate(search.best_by_depth()).values(), key=lambda choice: choice.rank).shapes[0][1]
        assert shape.nodes <= 3 if sequences == 1 else shape.nodes == 16, (sequences, shape)


# --- batches that form when several tasks share a load ----------------------------------------------------------------

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
