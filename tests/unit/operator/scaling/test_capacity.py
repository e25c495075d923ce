"""Capacity of one worker, and the replicas for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import ObjectiveSpec, ScalingSpec
from specdecode_operator.planning.acceptance import Objective, Request, prompt_of, prompt_token_seconds, request_of
from specdecode_operator.planning.estimates import StepTimeModel, buckets_for
from specdecode_operator.scaling import (
    Demand,
    Limits,
    Mix,
    ServiceLoad,
    WorkerModel,
    arrival_rate,
    scale,
    scaling_limit,
    step_pace,
    waiting_seconds,
)
from specdecode_operator.state.learned import LearnedState, LoadState, PodState, ScalingState, TrafficCell
from specdecode_operator.telemetry.counters import NO_TRAFFIC, Delta
from specdecode_operator.types import Capacity, StepEstimate, StepModel
from support.operators.estimates import FULL, chances, moments, spec

MIX = Mix(prompt_tokens=100, output_tokens=200, context_tokens=300)
LIMITS = Limits(max_sequences=16)


def step(seconds: float, tokens: float = 2.0, least_tokens: float = 2.0, error: float = 0.0) -> StepEstimate:
    return StepEstimate(seconds, tokens, least_tokens, error)


def capacity(mix: Mix, step_model: StepModel, limits: Limits, standard_errors: float = 0.0) -> Capacity:
    return WorkerModel(mix=mix, step_model=step_model, limits=limits, standard_errors=standard_errors).capacity()


def pace(sequences: float, prompt_tokens: float) -> StepEstimate:
    """20 ms, 1 ms a sequence, 0.1 ms a prompt's token; 2 tokens a step."""
    return step(0.02 + 0.001 * sequences + 0.0001 * prompt_tokens, error=0.05)


# --- capacity -----------------------------------------------------------------------------------------------------


def test_at_capacity_the_running_sequences_are_a_fixed_point() -> None:
    result = capacity(MIX, pace, LIMITS)
    seconds = pace(result.sequences, result.rate * MIX.prompt_tokens * result.step_seconds).seconds
    assert result.step_seconds == pytest.approx(seconds)
    assert result.sequences == pytest.approx(result.rate * MIX.output_tokens * seconds / 2.0)


def test_without_an_objective_a_fifth_of_the_slots_is_for_bursts() -> None:
    result = capacity(MIX, pace, LIMITS)
    assert result.limited_by == "slots"
    assert result.sequences == pytest.approx(0.8 * 16, abs=0.1)


@pytest.mark.parametrize(
    ("limits", "by", "sequences"),
    [
        # t / 2 = 14 ms at t = 28 ms: 20 + b + 0.1 * 100 * b * 2 / 200 = 28 where 1.1 b = 8.
        ({"itl_seconds": 0.014}, "itl", 8 / 1.1),
        ({"cache_tokens": 3000.0}, "cache", 9.0),
        ({"ttft_seconds": 0.0425, "max_sequences": 64}, "ttft", 7.58),
    ],
)
def test_the_first_objective_that_is_missed_bounds_it(limits: dict[str, Any], by: str, sequences: float) -> None:
    result = capacity(MIX, pace, replace(LIMITS, **limits))
    assert result.limited_by == by
    assert result.sequences == pytest.approx(sequences, rel=0.02)


def test_a_lower_confidence_bound_is_lower() -> None:
    mean, least = (
        capacity(MIX, pace, replace(LIMITS, itl_seconds=0.014), standard_errors=errors) for errors in (0, 1.28)
    )
    assert least.rate < 0.9 * mean.rate


def test_an_objective_out_of_reach_is_reported() -> None:
    result = capacity(MIX, pace, replace(LIMITS, itl_seconds=0.005))
    assert not result.attainable
    limit = scaling_limit(ScalingSpec(max_replicas=9), 3, result)
    assert limit.reason == "ObjectiveOutOfReach"


def test_a_queue_grows_with_the_load() -> None:
    """Erlang C by the table: 10 slots at 8 Erlang wait with probability 0.4092."""
    assert waiting_seconds(8, 10, 1.0) == pytest.approx(0.4092 / 2, rel=1e-3)
    assert waiting_seconds(10, 10, 1.0) == math.inf


positive = st.floats(1e-6, 1e4)


@settings(max_examples=200)
@given(
    st.tuples(positive, positive, positive, positive),
    st.tuples(positive, positive, positive),
    st.one_of(st.none(), positive),
    st.one_of(st.none(), positive),
    st.integers(1, 1024),
)
def test_any_worker_has_a_capacity(
    law: tuple[float, float, float, float],
    mix: tuple[float, float, float],
    itl: float | None,
    ttft: float | None,
    most: int,
) -> None:
    base, each, read, tokens = law

    def any_pace(sequences: float, prompt_tokens: float) -> StepEstimate:
        return step(base + each * sequences + read * prompt_tokens, 1 + tokens % 8, 1.0, 0.1)

    request = Mix(prompt_tokens=mix[0], output_tokens=mix[1], context_tokens=mix[2])
    limits = Limits(max_sequences=most, cache_tokens=1e4, itl_seconds=itl, ttft_seconds=ttft)
    mean, least = (capacity(request, any_pace, limits, standard_errors=errors) for errors in (0.0, 1.28))
    assert 0 < least.rate <= mean.rate * (1 + 1e-9)
    assert 0 < mean.sequences <= most


# --- shallower before more workers --------------------------------------------------------------------------------


def planned(objective: Objective | None = None, **fields: Any) -> StepModel:
    learned, request = LearnedState(acceptance=chances(0.7), costs=FULL, wander=0.0), Request(100, 200, 500)
    return step_pace(spec(**fields), learned, buckets_for(16), request, objective or Objective(), kv_tokens=None)


def test_shapes_grow_shallower_with_the_load() -> None:
    result = [planned()(sequences, 0.0).tokens for sequences in (1, 4, 16, 64)]
    assert result == sorted(result, reverse=True)
    assert result[0] > result[-1]


@pytest.mark.parametrize("fields", [{"mode": "Static"}, {"mode": "Advisory"}, {"depth": {"min": 5}}], ids=str)
def test_a_least_gain_that_no_allowed_shape_has_leaves_a_capacity(fields: dict[str, Any]) -> None:
    """Rows that are not planned keep their shape, and a least depth allows no plain decoding."""
    model = planned(Objective(ObjectiveSpec(min_gain_percent=900)), **fields)
    assert capacity(MIX, model, LIMITS).rate > 0


def test_prompt_time_is_learned_from_steps_with_prefill() -> None:
    times = StepTimeModel.fit(FULL)
    x = (1.0, 4.0, 4.0, 2000.0, 0.0, 300.0)
    seconds = times.linear((*x[:-1], 0.0)) + 300 * 0.0002
    values = (10, 10 * seconds, 10 * seconds**2, 40, *(10 * v for v in x), *(0.0,) * 27)
    assert prompt_token_seconds(LearnedState(prefill=values), times) == pytest.approx(0.0002)


@pytest.mark.parametrize(("limit", "steps"), [(None, 3), (512, 3), (2048, 1), (100, 12)])
def test_the_limit_of_batched_tokens_says_how_many_steps_read_a_prompt(limit: int | None, steps: int) -> None:
    traffic = (TrafficCell(task="other", sums=(10, 10, 12000, 0, 2000)),)
    learned = LearnedState(costs=FULL, traffic=traffic, prefill=moments((1, 1, 1, 100, 0, 100), 0.5).values)
    prompt = prompt_of(learned, limit)
    assert prompt.steps == steps
    assert prompt.steps * prompt.seconds == pytest.approx(prompt_of(learned).seconds * 3)


def test_the_mean_request() -> None:
    assert request_of(LearnedState()) is None
    sums = (TrafficCell(task="other", sums=(10, 10, 4000, 1000, 2000)),)
    assert request_of(LearnedState(traffic=sums)) == Request(prompt=300, output=200, context=500)


def test_the_first_answers_are_not_as_long_as_all_that_run() -> None:
    """Five came, one of them has ended after 32 tokens; the other four have said half as much."""
    sums = (TrafficCell(task="other", sums=(5, 1, 100, 0, 32 + 4 * 16)),)
    result = request_of(LearnedState(traffic=sums, load=LoadState(sequences=4)))
    assert result.output == pytest.approx(32)
    waiting = (TrafficCell(task="other", sums=(50, 10, 100, 0, 10 * 32 + 4 * 16)),)
    result = request_of(LearnedState(traffic=waiting, load=LoadState(sequences=4)))
    assert result.output == pytest.approx(32), "waiting requests have no output yet"
    fleet = LearnedState(traffic=waiting, load=LoadState(sequences=2), pods=(PodState(uid="a"), PodState(uid="b")))
    assert request_of(fleet).output == pytest.approx(32), "two workers, of two sequences each"


# --- replicas -----------------------------------------------------------------------------------------------------

SPEC = ScalingSpec(min_replicas=1, max_replicas=8, scale_down_window="60s")
ONE = Capacity(rate=2.0, sequences=10, step_seconds=0.03, limited_by="itl")


def demand(rate: float, *, waiting: float = 0, running: float = 1, is_complete: bool = True, **load: Any) -> Demand:
    usual = {"capacity_bound": ONE, "arrival_rate": rate, "window_arrival_rate": rate, "arrival_rate_bound": rate}
    return Demand(
        requests=running + waiting,
        window_requests=running,
        max_num_seqs=16,
        is_complete=is_complete,
        waiting=waiting,
        load=ServiceLoad(capacity=ONE, **{**usual, **load}),
    )


def polls(demands: list[Demand], state: ScalingState | None = None) -> list[int]:
    state, replicas = state or ScalingState(replicas=1), []
    for index, one in enumerate(demands):
        state, _ = scale(SPEC, state, one, now=1000.0 + 5 * index)
        replicas.append(state.replicas)
    return replicas


def test_replicas_are_arrivals_over_capacity_and_the_backlog_over_its_time() -> None:
    assert polls([demand(5.0)] * 2) == [1, 3]
    assert polls([demand(5.0, waiting=120)] * 2) == [1, 4]


def test_long_requests_count_while_they_run() -> None:
    assert polls([demand(0.1, running=25)] * 2) == [1, 3]


def test_a_long_wait_adds_a_worker_at_once() -> None:
    """Half of two seconds at three a second is three requests."""
    assert polls([demand(3.0, waiting=4, ttft_seconds=2.0)]) == [2]
    assert polls([demand(3.0, waiting=2, ttft_seconds=2.0)]) == [1]


def test_a_long_wait_beyond_the_estimate_adds_a_worker_once_all_serve() -> None:
    waits = demand(1.0, waiting=9, ttft_seconds=2.0)
    assert polls([waits]) == [2]
    assert polls([replace(waits, is_complete=False)] * 3) == [1, 1, 1]
    assert polls([replace(waits, are_all_placed=False)]) == [1], "a node may be on its way"


def test_few_arrivals_add_no_worker_and_remove_none() -> None:
    few = demand(2.4, arrival_rate_bound=1.9)
    assert polls([few] * 10) == [1] * 10
    assert polls([few] * 30, ScalingState(replicas=2))[-1] == 2
    assert polls([demand(2.4, arrival_rate_bound=2.1)] * 2) == [1, 2]


def test_the_bound_of_an_arrival_rate_narrows_with_the_number_of_arrivals() -> None:
    def least(count: int, polls: int) -> float:
        """Return the lower bound after ``polls`` polls of five seconds with ``count`` arrivals each."""
        traffic = {"other": NO_TRAFFIC._replace(arrivals=count)}
        window = [Delta(at=5.0 * index, seconds=5.0, traffic=traffic) for index in range(1, polls + 1)]
        return arrival_rate(window, now=5.0 * polls, within=100, standard_errors=2)

    assert least(1, 1) == 0, "one says nothing"
    assert least(4, 1) == 0
    assert least(4, 4) == pytest.approx((16 - 2 * 4) / 20)
    assert least(400, 4) == pytest.approx((1600 - 2 * 40) / 20)
    assert arrival_rate([], now=0, within=15, standard_errors=2) == 0


def test_falls_only_when_the_rest_has_a_tenth_to_spare() -> None:
    assert polls([demand(3.9)] * 30, ScalingState(replicas=3))[-1] == 3
    assert polls([demand(3.5)] * 30, ScalingState(replicas=3))[-1] == 2


def test_the_lower_bound_decides_the_fall_and_the_mean_the_rise() -> None:
    unsure = demand(3.5, capacity_bound=replace(ONE, rate=1.0))
    assert polls([unsure] * 3, ScalingState(replicas=1))[-1] == 2
    assert polls([unsure] * 30, ScalingState(replicas=3))[-1] == 3


rates = st.floats(0, 1e6)


@given(rates, rates, rates, rates, st.integers(1, 8), st.integers(0, 3), st.booleans())
def test_more_demand_never_means_fewer_workers(
    rate: float, more: float, running: float, waiting: float, replicas: int, above: int, trusted: bool
) -> None:
    state = ScalingState(replicas=replicas, above_polls=above, below_since=0)
    less, _ = scale(SPEC, state, demand(rate, running=running, waiting=waiting, is_complete=trusted), now=1000)
    for one in (
        demand(rate + more, running=running, waiting=waiting, is_complete=trusted),
        demand(rate, running=running + more, waiting=waiting, is_complete=trusted),
        demand(rate, running=running, waiting=waiting + more, is_complete=trusted),
    ):
        greater, _ = scale(SPEC, state, one, now=1000)
        assert greater.replicas >= less.replicas
        assert greater.wanted >= less.wanted
        assert 1 <= greater.replicas <= 8
