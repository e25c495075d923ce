"""Rows of several tasks at one load: chosen together, moved apart, within what the spec says of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import ObjectiveSpec, SpeculationSpec
from specdecode_operator.planning.acceptance import Objective, Prompt, bounds_of, follows, names, plans
from specdecode_operator.planning.estimates import Load, features
from specdecode_operator.planning.search import Chosen
from specdecode_operator.state.learned import (
    AcceptanceCell,
    LearnedState,
    LoadState,
    RequestCell,
    RowState,
    StepTimeCell,
    TrafficCell,
)
from specdecode_worker.contract import TreeShape
from support.operators.estimates import FULL, chances, cost, planned, spec

CODE = {"name": "code"}
BUSY = (4, 0)
"""The row of 9 to 16 sequences."""
VERIFYING = tuple(cost(n, d, 0.02 + 0.0005 * d + 0.0002 * n * (d + 1)) for n in (1, 4, 16) for d in range(6))
"""A busy machine: passes are cheap, every verified token counts."""


def traffic(**output_tokens: float) -> tuple[TrafficCell, ...]:
    """Of so many requests that nobody doubts the mix: a token each."""
    counts = {task: 1000 * tokens for task, tokens in output_tokens.items()}
    return tuple(TrafficCell(task=task, sums=(n, n, n, 0, n)) for task, n in counts.items())


def known(mix: Mapping[str, float], *, costs: tuple[StepTimeCell, ...] = VERIFYING, **rates: float) -> LearnedState:
    """Return what was learnt of tasks with these acceptance rates, and with so many output tokens of each."""
    acceptance = tuple(cell for task, rate in rates.items() for cell in chances(rate, task=task))
    return LearnedState(acceptance=acceptance, costs=costs, wander=0.0, traffic=traffic(**mix))


def shapes(found: Chosen, load: tuple[int, int] = (0, 0)) -> dict[str, TreeShape]:
    return {row.task: row.shape for row in found.rows if (row.concurrency, row.context) == load}


def depths(found: Chosen, load: tuple[int, int] = (0, 0)) -> dict[str, int]:
    return {task: shape.depth for task, shape in shapes(found, load).items()}


def settled(speculation: SpeculationSpec, learned: LearnedState, now: float = 2000.0) -> Chosen:
    for _ in range(6):
        found = planned(speculation, learned, now)
        learned, now = learned.model_copy(update={"rows": found.rows}), now + 100
    return found


# --- what the spec says of a task ---------------------------------------------------------------------------------


def test_a_task_that_is_off_never_drafts_and_a_static_one_stays() -> None:
    speculation = spec(
        tasks=[{"name": "sql", "mode": "Off"}, {"name": "code", "mode": "Static", "depth": {"initial": 2}}]
    )
    found = settled(speculation, known({"other": 900, "sql": 10, "code": 10}, other=0.95))
    assert depths(found, BUSY) == {"other": 5, "sql": 0, "code": 2}
    assert {row.depth for row in found.rows if row.task == "sql"} == {0}, "at every load, seen or not"


def test_a_task_has_bounds_of_its_own() -> None:
    speculation = spec(depth={"max": 3}, tasks=[{"name": "code", "depth": {"max": 5}}, {"name": "chat"}])
    learned = known({"other": 1, "code": 900, "chat": 1}, other=0.95, code=0.95, chat=0.95)
    assert depths(settled(speculation, learned), BUSY) == {"other": 3, "code": 5, "chat": 3}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, (1, 5, 3)),
        ({"max": 2}, (1, 2, 2)),
        ({"min": 4}, (4, 5, 4)),
        ({"max": 8}, (1, 8, 3)),
        ({"max": 0}, (0, 0, 0)),
    ],
)
def test_what_a_task_leaves_out_is_as_for_all(own: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = bounds_of(spec(depth={"min": 1}, tasks=[{"name": "code", "depth": own}]), "code")
    assert (found.least, found.most, found.initial) == expected


def test_rows_are_planned_where_any_mode_asks_for_them() -> None:
    assert plans(spec(mode="Advisory"))
    assert not follows(spec(mode="Advisory"))
    assert not plans(spec(mode="Static", tasks=[CODE]))
    assert follows(spec(mode="Static", tasks=[{"name": "code", "mode": "Auto"}]))
    assert not plans(spec(mode="Off", tasks=[{"name": "code", "mode": "Auto"}]))


def test_the_rest_is_static_where_one_task_is_auto() -> None:
    speculation = spec(mode="Static", tasks=[{"name": "code", "mode": "Auto"}])
    assert depths(settled(speculation, known({}, other=0.02, code=0.02)), BUSY) == {"other": 3, "code": 0}


# --- the choice for all tasks at once -----------------------------------------------------------------------------


def test_a_tasks_row_moves_and_leaves_the_others() -> None:
    speculation = spec(tasks=[CODE, {"name": "prose"}])
    mix = {"other": 1, "code": 300, "prose": 300}
    before = settled(speculation, known(mix, other=0.8, code=0.9, prose=0.8))
    assert depths(before, BUSY)["prose"] >= 3
    hard = known(mix, code=0.9, prose=0.1)
    after = settled(speculation, hard.model_copy(update={"rows": before.rows}))
    assert depths(after, BUSY)["code"] == depths(before, BUSY)["code"]
    assert depths(after, BUSY)["prose"] <= 1


@pytest.mark.parametrize(("code", "depth"), [(300, 3), (0, 0)])
def test_a_row_that_is_chosen_to_stay_does_not_follow_the_one_that_moves(code: int, depth: int) -> None:
    """Code stands where it began, which is the deepest that it may; only without traffic nobody chose that for it."""
    learned = known({"other": 300, "code": code}, other=0.02, code=0.95)
    speculation = spec(depth={"max": 3}, tasks=[CODE])
    found = planned(speculation, learned)
    assert depths(found, BUSY) == {"other": 0, "code": depth}
    again = planned(speculation, learned.model_copy(update={"rows": found.rows}), 2000.0 + 100)
    assert depths(again, BUSY) == {"other": 0, "code": depth}


def test_few_requests_take_nobody_deeper() -> None:
    """Requests differ in what a deeper shape brings them: as many drafts of three answers say less than of fifty."""
    row = RowState(concurrency=4, context=0, task="other", depth=1, since=1)

    def depth_after(arrivals: int, *, drafts: int) -> int:
        requests = RequestCell(task="other", sums=(10.0, 300.0, 400.0, 9e3, 1.2e4, 1.6e4))
        came = TrafficCell(task="other", sums=(arrivals, arrivals, 0.0, 0.0, 100.0 * arrivals))
        learned = LearnedState(
            acceptance=chances(0.7, total=drafts),
            requests=(requests,),
            costs=VERIFYING,
            traffic=(came,),
            wander=0.0,
            rows=(row,),
        )
        return depths(planned(spec(depth={"max": 3}), learned), BUSY)["other"]

    assert depth_after(50, drafts=2000) > 1
    assert depth_after(1, drafts=2000) == 1, "one came, be its drafts as many as they are"
    assert depth_after(50, drafts=40) == 1, "since acceptance changed there was one"


def test_what_is_known_of_a_task_without_rows_here_is_nobodys() -> None:
    """``other`` fell silent: the rows of the rest are chosen without it, and what it once sent must not matter."""
    requests = tuple(RequestCell(task=task, sums=(10.0, 300.0, 400.0, 9e3, 1.2e4, 1.6e4)) for task in ("other", "code"))
    learned = known({"other": 0.01, "code": 300}, other=0.8, code=0.9).model_copy(update={"requests": requests})
    assert depths(settled(spec(tasks=[CODE]), learned), BUSY)["code"] >= 3


def test_a_rare_task_moves_for_its_own_gain() -> None:
    """Of a few requests in a hundred, three percent of all tokens would ask for half as much again."""
    stand = tuple(
        RowState(concurrency=4, context=0, task=task, depth=depth, since=1)
        for task, depth in (("other", 3), ("code", 1))
    )
    learned = known({"other": 900, "code": 20}, other=0.9, code=0.95).model_copy(update={"rows": stand})
    found = planned(spec(tasks=[CODE], depth={"max": 3}), learned)
    assert depths(found, BUSY) == {"other": 3, "code": 3}
    assert 0 < next(change.gain or 0 for change in found.changes if change.row.concurrency == 4) < 0.03


def test_trees_are_grown_where_siblings_pay() -> None:
    ranked = tuple(cell.model_copy(update={"ranks": (300.0,)}) for cell in chances(0.5))
    found = settled(spec(tree={"topK": 2, "maxNodes": 10}), LearnedState(acceptance=ranked, costs=FULL, wander=0.0))
    shape = shapes(found)["other"]
    assert not shape.is_chain
    assert shape.nodes <= 10
    chain = settled(spec(tree={"topK": 1, "maxNodes": 10}), LearnedState(acceptance=ranked, costs=FULL, wander=0.0))
    assert shapes(chain)["other"].is_chain


# --- promises and limits ------------------------------------------------------------------------------------------


def slow_verify(sequences: float, depth: int) -> float:
    return 0.02 + 0.006 * depth


def test_the_time_to_the_next_token_of_the_worst_task_is_a_bound() -> None:
    """Deep chains bring most tokens in all, but the task whose drafts fail pays for every pass."""
    costs = tuple(cost(16, d, slow_verify(16, d)) for d in range(6))
    learned = known({"other": 990, "hard": 10}, costs=costs, other=0.95, hard=0.02)
    tasks = [{"name": "hard"}]
    assert depths(settled(spec(tasks=tasks), learned), BUSY)["other"] == 5
    found = settled(spec(tasks=tasks, objective={"itl": "40ms"}), learned)
    assert 1 <= depths(found, BUSY)["other"] <= 3, "0.02 + 0.006 depth must stay below 0.04"


def test_who_runs_alone_does_not_pay_for_anothers_depth() -> None:
    costs = tuple(cost(1, d, slow_verify(1, d)) for d in range(6))
    learned = known({"other": 500, "hard": 500}, costs=costs, other=0.95, hard=0.02)
    promised = spec(tasks=[{"name": "hard"}], objective={"itl": "40ms"})
    assert depths(settled(promised, learned)) == {"other": 5, "hard": 0}


def test_the_time_to_the_first_token_is_a_bound() -> None:
    objective = Objective(ObjectiveSpec(ttft="100ms"), prompt=Prompt(steps=2, seconds=0.01))
    assert objective.violation(0.032, [1.0]) == pytest.approx(0.0, abs=1e-6)
    assert objective.violation(0.064, [1.0]) == pytest.approx(0.8)


def test_a_least_speedup_stops_what_gains_too_little() -> None:
    learned = known({}, costs=FULL, other=0.3)
    assert depths(settled(spec(), learned))["other"] == 1
    assert depths(settled(spec(objective={"minGainPercent": 50}), learned))["other"] == 0


# --- properties ---------------------------------------------------------------------------------------------------

rates = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e5), st.floats(0, 1e3)), max_size=6)
timed = st.lists(
    st.tuples(st.floats(0.5, 64), st.integers(0, 6), st.floats(1e-5, 10), st.floats(1, 1e5), st.integers(0, 20)),
    max_size=8,
)
objectives = st.fixed_dictionaries(
    {},
    optional={
        "itl": st.integers(1, 10**5).map("{}ms".format),
        "ttft": st.integers(1, 10**5).map("{}ms".format),
        "minGainPercent": st.integers(0, 200),
    },
)
tasks = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "b", "other"])},
        optional={
            "mode": st.sampled_from(["Off", "Static", "Auto"]),
            "depth": st.integers(0, 6).map(lambda depth: {"max": depth}),
        },
    ),
    max_size=3,
    unique_by=lambda task: str(task["name"]),
)
bounds = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)).map(sorted)
stood = st.lists(st.integers(0, 4), max_size=6).map(
    lambda found: TreeShape(tuple(sorted(min(parent, node) for node, parent in enumerate(found))))
)


def timed_cost(found: tuple[float, int, float, float, int]) -> Any:
    """A cell of a tree: so many passes, and so many tokens more than a chain verifies."""
    sequences, passes, seconds, count, more = found
    cell = cost(sequences, passes, seconds, count=count, at=1900)
    values = list(cell.values)
    extra = features(Load(sequences, 500), passes, passes + 1 + more)[2]
    values[4 + 2] = count * extra
    return cell.model_copy(update={"values": tuple(values), "tokens_bucket": 1 << more})


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(rates, rates, timed, bounds, tasks, objectives, stood, st.integers(1, 3), st.integers(6, 12), st.booleans())
def test_any_memory_gives_rows_within_bounds_and_none_that_is_worse(
    other: list[tuple[float, float, float]],
    siblings: list[tuple[float, float, float]],
    times: list[tuple[float, int, float, float, int]],
    bound: list[int],
    task: list[dict[str, Any]],
    objective: dict[str, float],
    shape: TreeShape,
    top_k: int,
    nodes: int,
    held: bool,
) -> None:
    """Nothing raises, the same input gives the same rows, and a move is expected to gain unless the spec or a probe
    asks for it."""
    low, initial, high = bound
    speculation = spec(
        depth={"min": low, "max": high, "initial": initial},
        tree={"topK": top_k, "maxNodes": nodes},
        objective=objective,
        tasks=task,
        limits={"min_dwell_seconds": 0},
    )
    acceptance = [
        AcceptanceCell(task=name, depth=d, parent=parent, hits=p * n, total=n, ranks=(min(extra, n - p * n),), at=1)
        for parent, found in (("main", other), ("sibling", siblings))
        for name in ("other", "a")
        for d, (p, n, extra) in enumerate(found, start=1)
    ]
    cells = {(c.tokens_bucket, c.draft_passes): c for c in map(timed_cost, times)}
    stands = RowState(concurrency=0, context=0, task="other", depth=0, since=5).running(shape)
    learned = LearnedState(
        acceptance=tuple(acceptance), costs=tuple(cells.values()), rows=(stands,), load=LoadState(at=1999)
    )
    more = {"held_back": {(0, 0)} if held else set(), "kv_tokens": 5000.0}
    found = planned(speculation, learned, **more)
    assert found == planned(speculation, learned, **more)
    assert {row.task for row in found.rows} <= set(names(speculation))
    for row in found.rows:
        assert bounds_of(speculation, row.task).nearest(row.shape) == row.shape
    for change in found.changes:
        is_trial = change.cause in ("probe", "trial")
        assert change.gain is None or change.gain >= 0 or is_trial or objective.get("minGainPercent")


@pytest.mark.parametrize(("code_at", "depth"), [(1995, 2), (1930, 3)])
def test_of_a_task_that_is_not_there_the_guards_hold_nothing_back(code_at: float, depth: int) -> None:
    """Prose grew hard. Where code is in the same batches, fewer passes for both are better than none; where prose runs
    alone, code's row says nothing of what is held back, and prose is stopped by itself once that is sure."""
    cells = [cell.model_copy(update={"at": 1999}) for cell in chances(0.3, depth=3, total=60)]
    cells += [cell.model_copy(update={"task": "code", "at": code_at}) for cell in chances(0.75, depth=3, total=300)]
    rows = tuple(RowState(concurrency=1, context=0, task=task, depth=3, since=1900) for task in ("code", "other"))
    costs = tuple(cost(2, depth, seconds) for depth, seconds in enumerate((0.3, 0.32, 0.34, 0.45)))
    learned = LearnedState(acceptance=tuple(cells), costs=costs, rows=rows, traffic=traffic(code=20, other=20))
    slow = spec(tasks=[{"name": "code"}], depth={"max": 3}, limits={"min_dwell_seconds": 600})
    assert depths(planned(slow, learned, held_back={(1, 0)}), (1, 0)) == {"other": depth, "code": depth}


def test_rows_of_a_task_without_traffic_stand_still() -> None:
    """They would follow whoever drafts, and nobody runs them; but they stop where all others do."""
    tasks = spec(tasks=[{"name": "code"}])
    code = chances(0.95, task="code")
    learned = LearnedState(acceptance=code, costs=FULL, traffic=traffic(code=1000))
    assert depths(planned(tasks, learned)) == {"other": 3, "code": 5}
    busy = learned.model_copy(update={"traffic": traffic(code=990, other=10)})
    assert depths(planned(tasks, busy))["other"] > 3
    fair = tuple(cell.model_copy(update={"hits": 600.0}) for cell in code)
    dear = tuple(cost(1, depth, 0.02 + 0.01 * depth) for depth in range(6))
    found = depths(planned(tasks, learned.model_copy(update={"acceptance": fair, "costs": dear})))
    assert found["other"] == 3
    assert found["code"] == 1, "nobody pays for the passes of rows that nobody runs"
    bad = tuple(cell.model_copy(update={"hits": 20.0}) for cell in code)
    stopped = learned.model_copy(update={"acceptance": bad})
    assert depths(planned(tasks, stopped)) == {"other": 0, "code": 0}
