"""The whole pure loop over a batch of several tasks and over trees: each task finds its own, and the batch the best."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from specdecode_operator.planning.draft_trees import TaskAcceptance, shape_of
from specdecode_operator.planning.estimates import Estimate
from specdecode_worker.contract import TreeShape
from support.operators.mixed import MixedWorker, TaskTruth, batch_time, mixed_loop

CODE, PROSE = [0.8], [0.7]
BAD = [0.1]
QUICK = {"min_dwell_seconds": 10, "min_gain_percent": 3}
TASKS: list[dict[str, Any]] = [{"name": "code"}, {"name": "prose"}]


def speculation(**fields: Any) -> dict[str, Any]:
    return {"speculation": {"tasks": TASKS, "limits": QUICK, **fields}}


def rates(ranks: list[float]) -> TaskAcceptance:
    level = tuple(Estimate(chance, 0.0) for chance in ranks)
    return TaskAcceptance((level,) * 5, (level,) * 5)


def time_per_token(tasks: dict[str, TaskTruth], shapes: dict[str, TreeShape]) -> float:
    sequences = sum(task.sequences for task in tasks.values())
    verified = sum(task.sequences * (shapes[name].nodes + 1) for name, task in tasks.items())
    tokens = sum(task.sequences * rates(task.ranks).tokens(shapes[name]) for name, task in tasks.items())
    return batch_time(sequences, verified, max(shape.depth for shape in shapes.values())) * sequences / tokens


def oracle(tasks: dict[str, TaskTruth], top_k: int, nodes: int = 16) -> float:
    """The best of all trees by survival, of all tasks together."""
    choices = []
    for task in tasks.values():
        found = {TreeShape(())}
        for depth in range(6):
            best = rates(task.ranks).best_nodes(depth, top_k, nodes)
            found |= {shape_of(frozenset(node.path for node in best[:count])) for count in range(len(best) + 1)}
        choices.append(found)
    return min(time_per_token(tasks, dict(zip(tasks, pair, strict=True))) for pair in product(*choices))


def worker_of(loop: Any) -> MixedWorker:
    assert isinstance(loop.worker, MixedWorker)
    return loop.worker


@pytest.mark.parametrize("seed", range(2))
def test_a_task_that_turns_bad_stops_and_the_other_goes_on(seed: int) -> None:
    tasks = {"code": TaskTruth(6, CODE), "prose": TaskTruth(6, PROSE)}
    loop = mixed_loop(tasks, seed=seed, **speculation())
    loop.polls(24)
    before = worker_of(loop).shapes()
    assert min(shape.depth for shape in before.values()) >= 2
    tasks["prose"].ranks = BAD
    loop.polls(12)
    after = worker_of(loop).shapes()
    assert after["prose"].depth <= 1
    assert abs(after["code"].depth - before["code"].depth) <= 1
    assert time_per_token(tasks, after) < 1.08 * oracle(tasks, 1), "of clients that all wait for their answers"


@pytest.mark.parametrize("seed", range(2))
def test_trees_come_near_the_best_tree(seed: int) -> None:
    tasks = {"other": TaskTruth(2, [0.45, 0.2, 0.1])}
    loop = mixed_loop(
        tasks,
        seed=seed,
        speculation={"tree": {"topK": 3, "maxNodes": 16}, "limits": QUICK},
        workers={"accelerator": {"count": 0}},
    )
    loop.polls(30)
    found = worker_of(loop).shapes()
    assert not found["other"].is_chain
    assert time_per_token(tasks, found) < 1.06 * oracle(tasks, 3)
    assert time_per_token(tasks, found) < 0.97 * oracle(tasks, 1)


def test_a_trial_that_disappoints_is_over_at_once_and_not_repeated() -> None:
    """Trees cost what no line of chains foretells."""

    def trees_are_dear(sequences: float, verified: float, passes: int) -> float:
        return batch_time(sequences, verified, passes) + (0.02 if verified > sequences * (passes + 1) else 0)

    loop = mixed_loop(
        {"other": TaskTruth(2, [0.45, 0.2, 0.1])},
        speculation={"tree": {"topK": 3, "maxNodes": 16}, "limits": {"min_dwell_seconds": 100}},
    )
    worker_of(loop).batch_time = trees_are_dear
    seen = []
    for _ in range(72):
        loop.poll()
        seen.append(worker_of(loop).shapes()["other"].is_chain)
    assert 1 <= seen.count(False) <= 8, "tried, for less than a minute of six"
    assert all(seen[-36:])


@pytest.mark.slow
def test_what_does_not_change_stays() -> None:
    tasks = {"code": TaskTruth(4, CODE), "prose": TaskTruth(4, [0.4])}
    loop = mixed_loop(tasks, **speculation())
    loop.polls(36)
    settled = loop.versions[-1]
    loop.polls(72)
    assert loop.versions[-1] - settled <= 1, "six minutes of the same"
