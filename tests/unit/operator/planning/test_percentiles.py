"""Objectives on percentiles: their ratio to the mean, from latency histograms, and the shapes that they choose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import ObjectiveSpec
from specdecode_operator.planning.acceptance import Objective, percentile_ratio
from specdecode_worker.contract import LatencyHistogram, Plan, Report, TreeShape
from support.operators.fleet import Loop, SimulatedWorker, Truth, deployment_with

EDGES = (0.04, 0.05, 0.1, 0.4)
NARROW = LatencyHistogram(name="ttft", edges=EDGES, counts=(0, 990, 10, 0, 0), sum=45.0)
WIDE = LatencyHistogram(name="ttft", edges=EDGES, counts=(700, 200, 50, 50, 0), sum=45.0)


@dataclass
class MeasuredWorker(SimulatedWorker):
    """A worker that has measured time to the first token."""

    latency: tuple[LatencyHistogram, ...] = ()

    def report(self) -> Report:
        return super().report().model_copy(update={"latency": self.latency})


def depth_after(objective: dict[str, Any], *latency: LatencyHistogram) -> int:
    """Return the depth after five minutes with good drafts: 20 ms a step, and 2.4 ms more for each depth."""
    worker = MeasuredWorker(Truth(chances=[0.9] * 5), plan=Plan(initial=TreeShape.chain(3)), latency=latency)
    loop = Loop(deployment_with(speculation={"objective": objective, "depth": {"max": 5}}), worker)
    loop.polls(60)
    return loop.depths[-1]


@pytest.mark.slow
def test_the_histograms_say_how_far_a_percentile_is_from_the_mean() -> None:
    asked = {"ttft": "170ms", "percentile": 99}
    assert depth_after(asked, NARROW) == 5
    assert depth_after(asked, WIDE) <= 1
    assert depth_after(asked, NARROW.model_copy(update={"name": "queue"})) <= 1, "another latency says nothing"


def test_the_ratio_of_a_percentile_to_the_mean() -> None:
    assert percentile_ratio([], 99) == pytest.approx(-math.log(0.01)), "exponential while nothing was measured"
    assert percentile_ratio([NARROW.model_copy(update={"counts": (0, 9, 1, 0, 0)})], 99) == percentile_ratio([], 99)
    assert percentile_ratio([NARROW], 99) == pytest.approx(0.05 / 0.045)
    assert percentile_ratio([NARROW, NARROW], 99) == pytest.approx(0.05 / 0.045), "of all workers together"
    assert percentile_ratio([WIDE], 99) == pytest.approx((0.1 + 0.3 * 0.8) / 0.045), "interpolated within a bucket"


def test_both_latencies_have_a_ratio_of_their_own() -> None:
    asked = ObjectiveSpec(ttft="90ms", itl="40ms")
    assert Objective(asked).violation(0.06, [2.0]) == 0, "90 ms and 30 ms"
    assert Objective(asked, ttft_ratio=1.5).violation(0.06, [2.0]) == pytest.approx(0.5)
    assert Objective(asked, itl_ratio=2).violation(0.06, [2.0, 3.0]) == pytest.approx(0.5), "of the worst task"


@given(st.lists(st.integers(0, 1000), min_size=5, max_size=5), st.floats(0, 1e6))
@example([0, 0, 0, 0, 500], 1e-310)
def test_a_higher_percentile_is_never_lower(counts: list[int], seconds: float) -> None:
    cell = NARROW.model_copy(update={"counts": tuple(counts), "sum": seconds})
    found = [percentile_ratio([cell], percentile) for percentile in (50, 90, 95, 99)]
    assert found == sorted(found)
    assert all(math.isfinite(ratio) and ratio >= 0 for ratio in found)
