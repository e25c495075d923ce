"""Trees by survival, and the joint choice of all tasks' trees against trying every one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product

import pytest
from estimates import FULL, chances, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.planning.acceptance import rates
from specdecode_operator.planning.bounds import Bounds
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.mix import situations
from specdecode_operator.planning.options import weigh
from specdecode_operator.planning.promise import Promise, Prompt
from specdecode_operator.planning.situation import Situation, Task
from specdecode_operator.planning.steptime import StepTimes
from specdecode_operator.planning.trees import (
    Chance,
    Path,
    Rates,
    best_nodes,
    expected,
    parameters,
    paths_of,
    shape_of,
    slopes,
)
from specdecode_operator.state.learned import AcceptanceCell, LearnedState, RowState
from specdecode_worker.contract import TreeShape

LEVEL = (Chance(0.6, 0.01), Chance(0.2, 0.01), Chance(0.1, 0.01))
RATES = Rates((LEVEL,) * 4, ((Chance(0.5, 0.02), Chance(0.1, 0.02), Chance(0.05, 0.02)),) * 4)

ranked = st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2).map(lambda p: sorted(p, reverse=True))
levels = st.lists(ranked, min_size=2, max_size=2).map(
    lambda found: tuple(tuple(Chance(p / 2, 0.0) for p in level) for level in found)
)


def test_expected_tokens_and_their_slopes() -> None:
    shape = TreeShape((0, 0, 1, 1, 2))
    assert expected(RATES, TreeShape.chain(2)) == pytest.approx(1 + 0.6 + 0.36)
    assert expected(RATES, shape) == pytest.approx(1 + 0.6 + 0.2 + 0.36 + 0.12 + 0.2 * 0.5)
    found = slopes(RATES, shape)
    assert found.keys() == {parameter for path in paths_of(shape) for parameter in parameters(path)}
    nudged = Rates(((Chance(0.6 + 1e-6, 0), *LEVEL[1:]), *RATES.main[1:]), RATES.sibling)
    slope = (math.log(expected(nudged, shape)) - math.log(expected(RATES, shape))) / 1e-6
    assert found[1, True, 0] == pytest.approx(slope, rel=1e-4)


@given(st.integers(0, 4), st.integers(1, 3), st.integers(0, 40))
def test_every_prefix_of_the_best_nodes_is_a_tree_and_survival_falls(depth: int, top_k: int, most: int) -> None:
    nodes = best_nodes(RATES, depth=depth, top_k=top_k, most=most)
    assert [node.survival for node in nodes] == sorted((node.survival for node in nodes), reverse=True)
    for count in range(len(nodes) + 1):
        shape = shape_of(node.path for node in nodes[:count])
        assert (shape.nodes, shape.depth <= depth, max(shape.ranks) < top_k) == (count, True, True)
        assert set(paths_of(shape)) == {node.path for node in nodes[:count]}


def test_one_choice_a_token_makes_chains() -> None:
    shape = shape_of(node.path for node in best_nodes(RATES, depth=4, top_k=1, most=63))
    assert shape == TreeShape.chain(4)


def test_ranks_are_learnt_and_never_rise() -> None:
    seen = tuple(
        AcceptanceCell(task="other", depth=d, hits=400, total=1000, at=0, ranks=(300.0, 200.0, 250.0)) for d in (1, 2)
    )
    found = rates(LearnedState(acceptance=seen), None, 2, 4)
    assert [chance.p for chance in found.main[0]] == pytest.approx([0.4, 0.3, 0.2, 0.2], abs=0.01)
    assert found.sibling[1][0].p == pytest.approx(0.4, abs=0.05), "what was never seen leans on the main path"
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


ALL = [shape_of(found) for found in trees(2, 2)]
times = StepTimes.fit(FULL)


@settings(max_examples=60)
@given(levels, levels, levels, st.floats(1.5, 12), st.integers(0, 1))
def test_the_joint_choice_is_the_best_of_all(
    one: object, two: object, beside: object, sequences: float, n: int
) -> None:
    """Two tasks of equal share: 33 x 33 pairs of trees, and no pair beats what was found."""
    bounds = Bounds(0, 2, 0, 6, 2)
    known = (Rates(one, beside), Rates(two, beside))  # type: ignore[arg-type]
    tasks = tuple(Task(name, bounds, rate, share=0.5, demand=0.5) for name, rate in zip("ab", known, strict=True))
    assert times is not None
    situation = Situation(times, Load(sequences, 500), n, tasks, Promise())
    curves = [times.curve(situation.load, passes, n) for passes in range(3)]

    def per_token(*shapes: TreeShape) -> float:
        tokens = sum(expected(rate, shape) for rate, shape in zip(known, shapes, strict=True)) / 2
        verified = 1 + sum(shape.nodes for shape in shapes) / 2
        return curves[max(shape.depth for shape in shapes)].mean(verified) / tokens

    best = min(per_token(*pair) for pair in product(ALL, ALL))
    found = min(per_token(*(shape for _, shape in shapes)) for shapes in situation.best())
    assert found == pytest.approx(best, rel=1e-9)


def situation_of(learned: LearnedState, **fields: object) -> Situation:
    speculation = spec(**{"tree": {"topK": 2, "maxNodes": 12}, **fields})
    found = situations(speculation, learned, StepTimes.fit(learned.costs), kv_tokens=None, prompt=Prompt())
    situation = found(Load(4, 500), 0, [RowState(concurrency=2, context=0, task="other", depth=3)])
    assert situation is not None
    return situation


def test_what_the_best_shape_has_is_worth_its_price_and_what_it_lacks_is_not() -> None:
    """A node's price is the time that it takes over the time that a token is worth, (dt/dN) E / t. On a line of step
    times, at the best shape, every node survives at least that, and every other one less."""
    learned = LearnedState(
        acceptance=tuple(cell.model_copy(update={"ranks": (150.0,)}) for cell in chances(0.6)), costs=FULL
    )
    situation = situation_of(learned)
    options = weigh(situation, situation.best())
    best = min(options.by_shapes, key=lambda shapes: options.by_shapes[shapes].per_token)
    option, shape, task = options.by_shapes[best], best[0][1], situation.tasks[0]
    slope = situation.times.curve(situation.load, option.passes, situation.context).slope
    price = slope * option.tokens / option.seconds.mean
    assert 0 < price < 1
    nodes = best_nodes(task.rates, depth=shape.depth, top_k=2, most=12)
    inside = set(paths_of(shape))
    assert 2 < len(inside) < 12, shape
    assert min(node.survival for node in nodes if node.path in inside) > 0.95 * price
    assert max(node.survival for node in nodes if node.path not in inside) < 1.05 * price


def test_the_cache_bounds_the_nodes() -> None:
    speculation = spec(tree={"topK": 2, "maxNodes": 12})
    learned = LearnedState(acceptance=chances(0.9), costs=FULL)
    rows = [RowState(concurrency=2, context=0, task="other", depth=1)]
    at = situations(speculation, learned, StepTimes.fit(FULL), kv_tokens=4 * (500 + 2 * 3), prompt=Prompt())
    situation = at(Load(4, 500), 0, rows)
    assert situation is not None
    assert max(shapes[0][1].nodes for shapes in situation.best()) == 3
