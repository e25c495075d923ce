"""The loop with the worker's own half of it: guard, bursts and shadows decide what there is to learn from.

The same changes as in the end-to-end test of the plan, by many seeds and without a cluster.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from support.operators.fleet import Loop, Truth
from support.operators.piloted import piloted_loop

GOOD, BAD = [0.5, 0.45, 0.45, 0.45], [0.01] * 4
SPECULATION = {
    "depth": {"min": 0, "max": 4, "initial": 3},
    "tree": {"topK": 1},  # the made-up worker accepts nothing beside the main path
    "limits": {"min_dwell_seconds": 5, "min_gain_percent": 3, "explore_percent": 20},
}
POLL_SECONDS = 5.0
SETTLED_SECONDS = 170.0
"""With steps of a third of a second and much noise; a mean of 12 seeds is 105, and the slowest decides here."""
SEEN_SECONDS = 100.0
"""Of what is in use: it must outweigh what was remembered, and few steps a poll leave long in doubt."""
NOISES = pytest.mark.parametrize(("pass_seconds", "noise"), [(0.004, 0.01), (0.05, 0.15)])
SEEDS = pytest.mark.parametrize("seed", range(4))


def cheap(sequences: float, depth: int, context: float) -> float:
    return 0.3 + 0.002 * depth


def fair(sequences: float, depth: int, context: float) -> float:
    return 0.3 + 0.05 * depth


def costly(sequences: float, depth: int, context: float) -> float:
    return 0.3 if depth == 0 else 0.302 if depth == 1 else 0.6


def seconds_until(loop: Loop, depths: Collection[int]) -> float:
    for polls in range(1, 100):
        loop.poll(POLL_SECONDS)
        if loop.depths[-1] in depths:
            return polls * POLL_SECONDS
    return 100 * POLL_SECONDS


@NOISES
@SEEDS
def test_depth_follows_slow_steps_down_and_up(seed: int, pass_seconds: float, noise: float) -> None:
    truth = Truth(chances=GOOD, step_time=cheap, sequences=2, noise=noise)
    loop = piloted_loop(truth, seed=seed, pass_seconds=pass_seconds, **SPECULATION)
    assert seconds_until(loop, {2, 3, 4}) <= SETTLED_SECONDS
    truth.step_time = costly
    assert seconds_until(loop, {0, 1}) <= SEEN_SECONDS, "what is in use shows at once"
    loop.polls(4)
    truth.step_time = cheap
    assert seconds_until(loop, {2, 3, 4}) <= SETTLED_SECONDS


@NOISES
@SEEDS
def test_depth_follows_acceptance_down_and_up(seed: int, pass_seconds: float, noise: float) -> None:
    truth = Truth(chances=GOOD, step_time=fair, sequences=2, noise=noise)
    loop = piloted_loop(truth, seed=seed, pass_seconds=pass_seconds, **SPECULATION)
    loop.polls(40)
    assert seconds_until(loop, {1, 2, 3, 4}) <= SETTLED_SECONDS
    truth.chances = BAD
    assert seconds_until(loop, {0}) <= SETTLED_SECONDS
    truth.chances = GOOD
    assert seconds_until(loop, {1, 2, 3, 4}) <= SETTLED_SECONDS


@pytest.mark.parametrize("seed", range(8))
def test_what_the_guard_holds_back_leaves_the_plan(seed: int) -> None:
    """Steps that have become ten times slower are timed where they run; a guard's veto leaves the rest as it was."""
    truth = Truth(chances=GOOD, step_time=lambda s, d, c: 0.03 + 0.004 * d, sequences=2, noise=0.05)
    loop = piloted_loop(truth, seed=seed, **SPECULATION)
    loop.polls(20)
    truth.step_time = fair
    loop.poll()
    assert seconds_until(loop, {1, 2, 3, 4}) <= SETTLED_SECONDS
    truth.chances = BAD
    assert seconds_until(loop, {0}) <= SETTLED_SECONDS, "it runs plainly meanwhile"


@SEEDS
def test_what_does_not_change_stays(seed: int) -> None:
    truth = Truth(chances=GOOD, step_time=lambda s, d, c: fair(s, d, c) / 10, sequences=2, noise=0.1)
    loop = piloted_loop(truth, seed=seed, **SPECULATION)
    loop.polls(30)
    settled = loop.versions[-1]
    loop.polls(60)
    assert loop.versions[-1] - settled <= 1, loop.depths[30:]


def test_a_load_of_slow_steps_is_seen() -> None:
    """Depth in use is told of the row at the present load: so it must follow where a poll has but a few steps."""
    truth = Truth(chances=GOOD, step_time=lambda s, d, c: 0.8 + 0.3 * d, sequences=2, noise=0.01)
    loop = piloted_loop(truth, **SPECULATION)
    loop.polls(3)
    assert loop.memory.learned.load.sequences == 2
