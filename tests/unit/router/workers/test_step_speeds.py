"""Relative speeds from step times: other hardware, other loads, noise, and workers that come and go."""

from __future__ import annotations

import random

import pytest

from specdecode_router.workers.step_speeds import (
    INTERVAL_SECONDS,
    MIN_COMPARED_STEPS,
    RATIO,
    StepKind,
    StepSpeeds,
    StepSums,
    relative_speeds,
)
from support.clock import Clock

PLAIN: StepKind = (8, 0, False, 1024)
DRAFTED: StepKind = (32, 3, False, 1024)
PREFILL: StepKind = (512, 0, True, 1024)


def sums(steps: int = 500, factor: float = 1.0, *kinds: StepKind) -> dict[StepKind, StepSums]:
    """Return step times of a worker that is slower by ``factor``. A kind with more tokens takes longer."""
    return {kind: StepSums(steps, steps * factor * 0.001 * kind[0]) for kind in kinds or (PLAIN, DRAFTED)}


def test_a_worker_of_half_the_step_time_has_twice_the_speed() -> None:
    speeds = relative_speeds({"slow": sums(), "fast": sums(500, 0.5)})
    assert speeds["fast"] / speeds["slow"] == pytest.approx(2)


def test_only_steps_of_one_kind_are_compared() -> None:
    speeds = relative_speeds({"long prompts": sums(500, 1.0, PLAIN, PREFILL), "short answers": sums(900, 1.0, PLAIN)})
    assert speeds == pytest.approx({"long prompts": 1.0, "short answers": 1.0})


def test_without_steps_in_common_there_is_no_speed() -> None:
    assert relative_speeds({"a": sums(500, 1.0, PREFILL), "b": sums(500, 3.0, PLAIN)}) == {}
    assert relative_speeds({"a": sums(), "b": sums(MIN_COMPARED_STEPS // 4)}) == pytest.approx({"a": 1.0})
    assert relative_speeds({"a": sums()}) == {}


def test_noise_changes_no_speed() -> None:
    clock, noise = Clock(), random.Random(1)
    speeds = StepSpeeds(clock)
    for _ in range(200):
        clock.now += INTERVAL_SECONDS
        for name in "abc":
            speeds.record(name, sums(500, noise.uniform(0.9, 1.1)))
    assert {speeds.of(name) for name in "abc"} == {1.0}


def test_a_speed_in_use_is_a_power_of_the_ratio_and_stays_near_a_boundary() -> None:
    clock = Clock()
    speeds = StepSpeeds(clock)
    seen = []
    for factor in (1.0, 0.45, 0.5, 0.55, 1.0):
        clock.now += INTERVAL_SECONDS
        speeds.record("slow", sums())
        clock.now += INTERVAL_SECONDS
        speeds.record("fast", sums(500, factor))
        seen.append((speeds.of("slow"), speeds.of("fast")))
    assert seen[0] == seen[-1] == (1.0, 1.0)
    assert seen[1] == seen[2] == seen[3] == (RATIO**-2, RATIO**2)


def test_workers_are_compared_once_in_an_interval() -> None:
    clock = Clock()
    speeds = StepSpeeds(clock)
    speeds.record("a", sums())
    speeds.record("b", sums(500, 0.25))
    assert speeds.of("b") == 1.0
    clock.now += INTERVAL_SECONDS
    speeds.record("a", sums())
    assert speeds.of("b") > 1.5


def test_a_worker_that_is_gone_counts_no_more() -> None:
    clock = Clock()
    speeds = StepSpeeds(clock)
    speeds.record("a", sums())
    clock.now += INTERVAL_SECONDS
    speeds.record("b", sums(500, 0.25))
    speeds.retain({"a"})
    assert speeds.of("b") == 1.0
    clock.now += INTERVAL_SECONDS
    speeds.record("a", sums())
    assert speeds.of("a") < 1.0, "its own speed stays until there is another worker to compare with"
