"""What one worker carries, and what replicas follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
from estimates import FULL, chances, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator import planning
from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.planning.pace import Pace, Request, prompt_token_seconds
from specdecode_operator.planning.steptime import StepTimes
from specdecode_operator.scaling import (
    TUNING,
    Demand,
    Limits,
    Mix,
    ServiceLoad,
    arrival_rate,
    capacity,
    deletion_costs,
    forecast_rate,
    placement_problem,
    scale,
    scaling_limit,
    update_forecast,
)
from specdecode_operator.scaling.capacity import waiting_seconds
from specdecode_operator.state.learned import ForecastState, LearnedState, LoadState, ScalingState, TrafficCell
from specdecode_operator.telemetry.counters import NO_TRAFFIC
from specdecode_operator.telemetry.deltas import Delta
from specdecode_operator.types import Capacity, Worker

MIX = Mix(prompt_tokens=100, output_tokens=200, context_tokens=300)
LIMITS = Limits(max_sequences=16)


@dataclass(frozen=True)
class Step:
    seconds: float
    tokens: float = 2.0
    least_tokens: float = 2.0
    error: float = 0.0


def pace(sequences: float, prompt_tokens: float) -> Step:
    """20 ms, 1 ms a sequence, 0.1 ms a prompt's token; 2 tokens a step."""
    return Step(0.02 + 0.001 * sequences + 0.0001 * prompt_tokens, error=0.05)


# --- capacity -----------------------------------------------------------------------------------------------------


def test_at_capacity_the_running_sequences_are_a_fixed_point() -> None:
    found = capacity(MIX, pace, LIMITS)
    seconds = pace(found.sequences, found.rate * MIX.prompt_tokens * found.step_seconds).seconds
    assert found.step_seconds == pytest.approx(seconds)
    assert found.sequences == pytest.approx(found.rate * MIX.output_tokens * seconds / 2.0)


def test_without_a_promise_a_fifth_of_the_slots_is_for_bursts() -> None:
    found = capacity(MIX, pace, LIMITS)
    assert found.limited_by == "slots"
    assert found.sequences == pytest.approx(0.8 * 16, abs=0.1)


@pytest.mark.parametrize(
    ("limits", "by", "sequences"),
    [
        # t / 2 = 14 ms at t = 28 ms: 20 + b + 0.1 * 100 * b * 2 / 200 = 28 where 1.1 b = 8.
        ({"itl_seconds": 0.014}, "itl", 8 / 1.1),
        ({"cache_tokens": 3000.0}, "cache", 9.0),
        ({"ttft_seconds": 0.0425, "max_sequences": 64}, "ttft", 7.58),
    ],
)
def test_the_first_promise_that_breaks_bounds_it(limits: dict[str, Any], by: str, sequences: float) -> None:
    found = capacity(MIX, pace, replace(LIMITS, **limits))
    assert found.limited_by == by
    assert found.sequences == pytest.approx(sequences, rel=0.02)


def test_a_lower_confidence_bound_is_lower() -> None:
    mean, least = (
        capacity(MIX, pace, replace(LIMITS, itl_seconds=0.014), standard_errors=errors) for errors in (0, 1.28)
    )
    assert least.rate < 0.9 * mean.rate


def test_a_promise_out_of_reach_is_said_so() -> None:
    found = capacity(MIX, pace, replace(LIMITS, itl_seconds=0.005))
    assert not found.attainable
    limit = scaling_limit(ScalingSpec(max_replicas=9), 3, found)
    assert limit is not None
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

    def any_pace(sequences: float, prompt_tokens: float) -> Step:
        return Step(base + each * sequences + read * prompt_tokens, 1 + tokens % 8, 1.0, 0.1)

    request = Mix(prompt_tokens=mix[0], output_tokens=mix[1], context_tokens=mix[2])
    limits = Limits(max_sequences=most, cache_tokens=1e4, itl_seconds=itl, ttft_seconds=ttft)
    mean, least = (capacity(request, any_pace, limits, standard_errors=errors) for errors in (0.0, 1.28))
    assert 0 < least.rate <= mean.rate * (1 + 1e-9)
    assert 0 < mean.sequences <= most


# --- shallower before more workers --------------------------------------------------------------------------------


def planned(**fields: Any) -> Pace:
    learned = LearnedState(acceptance=chances(0.7), costs=FULL, wander=0.0)
    found = planning.pace(spec(**fields), learned, planning.buckets(16), Request(100, 200, 500), kv_tokens=None)
    assert found is not None
    return found


def test_shapes_grow_shallower_with_the_load() -> None:
    found = [planned()(sequences, 0.0).tokens for sequences in (1, 4, 16, 64)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_a_worker_that_adapts_carries_more_than_one_of_fixed_depth() -> None:
    adapts = capacity(MIX, planned(), Limits(max_sequences=64))
    deep = capacity(MIX, planned(depth={"min": 5, "initial": 5}), Limits(max_sequences=64))
    assert adapts.rate > 1.05 * deep.rate


def test_what_reading_a_prompt_takes_is_learnt_from_steps_with_prefill() -> None:
    times = StepTimes.fit(FULL)
    assert times is not None
    x = (1.0, 4.0, 4.0, 2000.0, 0.0, 300.0)
    seconds = times.linear((*x[:-1], 0.0)) + 300 * 0.0002
    values = (10, 10 * seconds, 10 * seconds**2, 40, *(10 * v for v in x), *(0.0,) * 27)
    assert prompt_token_seconds(LearnedState(prefill=values), times) == pytest.approx(0.0002)


def test_the_mean_request() -> None:
    assert planning.request_of(LearnedState()) is None
    sums = (TrafficCell(task="other", sums=(10, 10, 4000, 1000, 2000)),)
    assert planning.request_of(LearnedState(traffic=sums)) == Request(prompt=300, output=200, context=500)


def test_the_first_answers_are_not_as_long_as_all_that_run() -> None:
    """Five came, one of them has ended after 32 tokens; the other four have said half as much."""
    sums = (TrafficCell(task="other", sums=(5, 1, 100, 0, 32 + 4 * 16)),)
    found = planning.request_of(LearnedState(traffic=sums, load=LoadState(sequences=4)))
    assert found is not None
    assert found.output == pytest.approx(32)
    waiting = (TrafficCell(task="other", sums=(50, 10, 100, 0, 10 * 32 + 4 * 16)),)
    found = planning.request_of(LearnedState(traffic=waiting, load=LoadState(sequences=4)))
    assert found is not None
    assert found.output == pytest.approx(32), "who waits has said nothing"


# --- replicas -----------------------------------------------------------------------------------------------------

SPEC = ScalingSpec(min_replicas=1, max_replicas=8, scale_down_window_seconds=60)
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


def polls(demands: list[Demand], memory: ScalingState | None = None) -> list[int]:
    memory, replicas = memory or ScalingState(replicas=1), []
    for index, one in enumerate(demands):
        scaled = scale(SPEC, memory, one, now=1000.0 + 5 * index)
        memory = scaled.state
        replicas.append(scaled.replicas)
    return replicas


def test_replicas_are_arrivals_over_capacity_and_the_backlog_over_its_time() -> None:
    assert polls([demand(5.0)] * 2) == [1, 3]
    assert polls([demand(5.0, waiting=120)] * 2) == [1, 4]


def test_long_requests_count_while_they_run() -> None:
    assert polls([demand(0.1, running=25)] * 2) == [1, 3]


def test_who_waits_for_long_is_not_kept_waiting() -> None:
    """Half of two seconds at three a second is three requests."""
    assert polls([demand(3.0, waiting=4, ttft_seconds=2.0)]) == [2]
    assert polls([demand(3.0, waiting=2, ttft_seconds=2.0)]) == [1]


def test_a_wait_that_the_estimate_does_not_explain_adds_a_worker_once_all_are_there() -> None:
    waits = demand(1.0, waiting=9, ttft_seconds=2.0)
    assert polls([waits]) == [2]
    assert polls([replace(waits, is_complete=False)] * 3) == [1, 1, 1]


def test_a_rate_that_few_arrivals_tell_raises_nothing_and_keeps_what_there_is() -> None:
    few = demand(2.4, arrival_rate_bound=1.9)
    assert polls([few] * 10) == [1] * 10
    assert polls([few] * 30, ScalingState(replicas=2))[-1] == 2
    assert polls([demand(2.4, arrival_rate_bound=2.1)] * 2) == [1, 2]


def test_arrivals_are_as_sure_as_they_are_many() -> None:
    def least(count: int, polls: int) -> float:
        """Of one poll of five seconds, so many times over."""
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


def test_a_forecast_raises_the_floor_and_is_no_demand() -> None:
    assert polls([demand(1.0, forecast_rate=5.0)] * 3)[-1] == 3
    assert polls([demand(1.0, forecast_rate=5.0)] * 40, ScalingState(replicas=4))[-1] == 3
    assert polls([demand(5.0, forecast_rate=0.0)] * 3)[-1] == 3, "never lowers"
    assert scale(SPEC, ScalingState(), demand(1.0, forecast_rate=50.0), now=0).wanted == 1


rates = st.floats(0, 1e6)


@given(rates, rates, rates, rates, st.integers(1, 8), st.integers(0, 3), st.booleans())
def test_more_demand_never_means_fewer_workers(
    rate: float, more: float, running: float, waiting: float, replicas: int, above: int, trusted: bool
) -> None:
    memory = ScalingState(replicas=replicas, above_polls=above, below_since=0)
    less = scale(SPEC, memory, demand(rate, running=running, waiting=waiting, is_complete=trusted), now=1000)
    for one in (
        demand(rate + more, running=running, waiting=waiting, is_complete=trusted),
        demand(rate, running=running + more, waiting=waiting, is_complete=trusted),
        demand(rate, running=running, waiting=waiting + more, is_complete=trusted),
    ):
        greater = scale(SPEC, memory, one, now=1000)
        assert greater.replicas >= less.replicas
        assert greater.wanted >= less.wanted
        assert 1 <= greater.replicas <= 8


# --- what limits, and who goes first ------------------------------------------------------------------------------


def test_pods_without_a_place_are_told_before_the_maximum() -> None:
    troubles = ("Unschedulable: 0/3 nodes are available", "worker: CrashLoopBackOff: x")
    workers = [Worker(name=name, uid=name, address=None, ready=False, trouble=name) for name in troubles]
    assert scaling_limit(SPEC, 3, ONE) is None
    at_most = scaling_limit(SPEC, 9, ONE)
    unplaced = scaling_limit(SPEC, 9, ONE, placement_problems=[None, placement_problem(None, workers)])
    assert at_most is not None
    assert unplaced is not None
    assert (at_most.reason, unplaced.reason) == ("AtMaximum", "Unschedulable")
    assert "1 pods" in unplaced.message


def test_the_least_loaded_goes_first_and_a_failing_one_before() -> None:
    costs = deletion_costs({"a": 3.0, "b": 1.0, "c": 9.0}, unhealthy=["c"])
    assert sorted(costs, key=lambda pod: costs[pod]) == ["c", "b", "a"]
    assert costs["c"] < 0 <= costs["b"]


# --- the forecast -------------------------------------------------------------------------------------------------


def days(rate_at: Any, count: float, memory: ForecastState | None = None) -> tuple[ForecastState, float]:
    state, now = memory or ForecastState(), 0.0
    while now < 86400 * count:
        now += TUNING.sample_seconds
        state = update_forecast(state, rate_at(now) * TUNING.sample_seconds, TUNING.sample_seconds, now=now)
    return state, now


def test_a_day_is_learnt_and_told_before_it_comes() -> None:
    def daily(now: float) -> float:
        return 9.0 if 9 * 3600 <= now % 86400 < 18 * 3600 else 1.0

    memory, now = days(daily, 2 + 8.75 / 24)
    soon, later = (forecast_rate(memory, now=now, ahead_seconds=ahead) for ahead in (60, 1200))
    assert soon < 2
    assert later > 6


def test_a_ramp_is_carried_on_and_noise_is_not() -> None:
    ramp, now = days(lambda now: 1 + now / 600, 1 / 24)
    assert forecast_rate(ramp, now=now, ahead_seconds=300) > ramp.level
    noise, now = days(lambda now: 5 + 4 * (int(now / 60) % 2), 1 / 24)
    assert forecast_rate(noise, now=now, ahead_seconds=300) < 9


def test_after_a_long_silence_nothing_is_foretold() -> None:
    memory, now = days(lambda now: 5.0, 0.1)
    assert forecast_rate(memory, now=now + 5000, ahead_seconds=60) == 0


@given(st.lists(st.tuples(st.floats(-10, 1e9), st.floats(-1, 1e5), st.floats(0, 1e6)), max_size=30), st.floats(0, 1e5))
def test_any_arrivals_have_a_forecast(seen: list[tuple[float, float, float]], ahead: float) -> None:
    memory = ForecastState()
    for arrivals, seconds, now in seen:
        memory = update_forecast(memory, arrivals, seconds, now=now)
        assert math.isfinite(forecast_rate(memory, now=now, ahead_seconds=ahead))
        assert forecast_rate(memory, now=now, ahead_seconds=ahead) >= 0
