"""Speed-up over all decoding steps, by task, the device time that it saves, and when figures are published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.controller.status import traffic_section
from specdecode_operator.decision.decide import PUBLISH_SECONDS
from specdecode_operator.decision.plan import figures_of, saved_seconds, speedup
from specdecode_operator.state.learned import StepTimeCell
from specdecode_operator.telemetry.counters import CellKey, Delta, Moments, RequestSums, TaskSums, difference
from specdecode_operator.types import TaskFigures
from specdecode_worker.contract import FEATURES, Buckets, HistogramCounts, Report, TaskCell
from support.operators.estimates import moments
from support.operators.fleet import Loop, loop_over

SEQUENCES = 4.0
PLAIN_SECONDS = 0.01


def steps(passes: int, count: float, seconds: float, tokens: float) -> tuple[CellKey, Moments]:
    """Return ``count`` steps of ``SEQUENCES`` sequences that take ``seconds`` and emit ``tokens`` a sequence."""
    x = (1.0, SEQUENCES, SEQUENCES * (1 + passes), 0.0, float(passes), 0.0)
    key = CellKey(int(SEQUENCES) * (1 + passes), passes, False, 0)
    return key, moments(x, seconds, count, spread=0, tokens=tokens)


PLAIN = steps(0, 1000, PLAIN_SECONDS, 1.0)


def test_steps_of_a_shape_are_compared_with_plain_steps() -> None:
    measured = speedup(dict([steps(3, 1000, 0.016, 2.0), steps(0, 10, PLAIN_SECONDS, 1.0)]), ())
    assert measured == pytest.approx(2 * PLAIN_SECONDS / 0.016, rel=0.01)


def test_rare_steps_of_a_shape_weigh_little_where_the_guard_runs_plain_decoding() -> None:
    """A shape that is a fifth slower in one step of a hundred changes the speed-up by 0.2 %."""
    assert speedup(dict([PLAIN, steps(3, 10, 0.025, 2.0)]), ()) == pytest.approx(1.0, abs=0.01)
    assert speedup(dict([PLAIN, steps(5, 10, 0.01, 3.0)]), ()) == pytest.approx(1.02, abs=0.01)


def test_shadow_drafts_count_with_their_cost() -> None:
    key, sums = steps(0, 1000, 1.25 * PLAIN_SECONDS, 1.0)
    shadowed = key._replace(draft_passes=3), sums
    assert speedup(dict([PLAIN, shadowed]), ()) == pytest.approx(2 / 2.25, rel=0.01)


def test_plain_steps_of_a_busy_moment_claim_no_more_than_the_tokens_of_a_step() -> None:
    measured = speedup(dict([steps(3, 10_000, 0.02, 2.0), steps(0, 10, 50 * PLAIN_SECONDS, 1.0)]), ())
    assert measured == pytest.approx(2, rel=0.03), "else it is 50"


def test_few_tokens_give_no_speedup() -> None:
    assert speedup(dict([steps(3, 20, 0.016, 2.0), steps(0, 20, PLAIN_SECONDS, 1.0)]), ()) is None


def test_no_speedup_where_most_steps_have_no_comparison() -> None:
    """Plain steps of another context are compared with themselves, which would give 1."""
    key, sums = steps(3, 1000, 0.016, 2.0)
    elsewhere = key._replace(context_bucket=2), sums
    assert speedup(dict([PLAIN, elsewhere]), ()) is None


# Tasks

FASTER = dict([steps(3, 1000, 0.016, 2.0), steps(0, 10, PLAIN_SECONDS, 1.0)])
"""Steps with a speed-up of 2 x 10 ms / 16 ms = 1.25."""


def tasks_of(delta: Delta) -> dict[str, TaskFigures]:
    return dict(figures_of([delta], (), {"code": 4, "chat": 4}, synthetic=False).tasks)


def test_speedup_of_tasks_follows_their_tokens_per_step() -> None:
    code = TaskSums(decode_steps=1000, decode_tokens=3000, ttft_count=0, ttft_seconds=0, itl_count=0, itl_seconds=0)
    chat = code._replace(decode_steps=3000, decode_tokens=3000)
    measured = tasks_of(Delta(steps=FASTER, tasks={"code": code, "chat": chat}))
    overall = speedup(FASTER, ())
    assert measured["code"].speedup == pytest.approx(overall * 3 / 1.5)
    assert measured["chat"].speedup == pytest.approx(overall * 1 / 1.5)
    weighted = (1000 * (measured["code"].speedup or 0) + 3000 * (measured["chat"].speedup or 0)) / 4000
    assert weighted == pytest.approx(overall), "weighted by steps, the tasks have the speed-up of the fleet"


def test_a_task_with_few_steps_has_no_speedup() -> None:
    few = TaskSums(49, 98, 0, 0, 0, 0)
    many = TaskSums(1000, 2000, 0, 0, 0, 0)
    measured = tasks_of(Delta(steps=FASTER, tasks={"code": few, "chat": many}))
    assert "code" not in measured, "nothing was measured of it"
    assert measured["chat"].speedup is not None


def test_no_task_has_a_speedup_while_the_fleet_has_none() -> None:
    measured = tasks_of(Delta(tasks={"code": TaskSums(1000, 2000, 2, 0.5, 10, 0.2)}))
    assert measured["code"] == TaskFigures(ttft_seconds=0.25, itl_seconds=0.02)


def test_acceptance_of_a_task_is_that_of_its_finished_requests() -> None:
    ended = RequestSums(n=5, a=100, d=50, aa=0, ad=0, dd=0)
    assert tasks_of(Delta(requests={"code": ended})) == {"code": TaskFigures(acceptance_rate=0.5, accepted_length=3.0)}
    assert tasks_of(Delta(requests={"code": ended._replace(d=49)})) == {}


def test_latencies_of_tasks_are_differences_of_reports() -> None:
    def report(seconds: float, counts: tuple[int, int], total: float, tokens: int) -> Report:
        latency = HistogramCounts(counts=counts, sum=total)
        cell = TaskCell(task="code", ttft=latency, itl=latency, decode_steps=100, decode_tokens=tokens)
        return Report(boot_id="b", worker="w", clock_seconds=seconds, tasks=(cell,))

    delta = difference(report(1, (1, 1), 9.0, 100), report(2, (2, 4), 10.0, 300), at=2, buckets=Buckets())
    assert delta.tasks == {"code": TaskSums(0, 200, 4, 1.0, 4, 1.0)}
    assert tasks_of(delta)["code"].ttft_seconds == 0.25


# Device time saved


def test_saved_seconds_are_the_plain_time_of_the_tokens_minus_the_time_taken() -> None:
    """1000 steps of 16 ms emit what takes plain decoding 2000 steps of 10 ms."""
    saved = saved_seconds(Delta(steps=FASTER), ())
    assert saved == pytest.approx(2000 * PLAIN_SECONDS - 1000 * 0.016)
    overall = speedup(dict([steps(3, 1000, 0.016, 2.0)]), _remembered())
    assert saved == pytest.approx((overall - 1) * 1000 * 0.016), "(speed-up - 1) x device time"


def test_each_device_of_a_worker_saves_the_time() -> None:
    one, four = (loop_over(explore=0.1, workers={"accelerator": {"count": count}}) for count in (1, 4))
    one.polls(12)
    four.polls(12)
    saved = one.memory.learned.saved_device_seconds
    assert saved > 0
    assert four.memory.learned.saved_device_seconds == pytest.approx(4 * saved)


def test_slower_steps_save_less_than_nothing() -> None:
    slow = dict([steps(3, 100, 0.025, 2.0), PLAIN])
    assert saved_seconds(Delta(steps=slow), ()) == pytest.approx(100 * (0.02 - 0.025))


def test_plain_steps_and_steps_without_comparison_save_nothing() -> None:
    assert saved_seconds(Delta(steps=dict([PLAIN])), ()) == 0
    slow = dict([steps(0, 5, 2 * PLAIN_SECONDS, 1.0)])
    assert saved_seconds(Delta(steps=slow), _remembered()) == 0, "plain steps differ from remembered ones by noise"
    assert saved_seconds(Delta(steps=dict([steps(3, 1000, 0.016, 2.0)])), ()) == 0
    assert saved_seconds(Delta(steps=dict([steps(3, 1000, 0.016, 2.0)])), _remembered()) == pytest.approx(4.0)


def test_steps_that_claim_tokens_of_no_sequence_are_left_out() -> None:
    """Found by test_any_report."""
    impossible = []
    for passes in (0, 3):
        key, sums = steps(passes, 1000, 0.016, 2.0)
        values = list(sums.values)
        values[4 + FEATURES.index("sequences")] = 0.0
        impossible.append((key._replace(tokens_bucket=1), Moments(tuple(values))))
    assert saved_seconds(Delta(steps=dict(impossible)), ()) == 0
    real = [PLAIN, steps(3, 1000, 0.016, 2.0)]
    assert speedup(dict([*impossible, *real]), ()) == speedup(dict(real), ())


def _remembered() -> tuple[StepTimeCell, ...]:
    key, sums = PLAIN
    return (StepTimeCell(**key._asdict(), values=sums.values, at=0),)


# Publication to status: seldom under traffic, and at once when traffic has ended


def poll(loop: Loop, seconds: float, *, works: bool) -> bool:
    """Poll, and write the figures to the status as the reconciler does. Return whether there were any."""
    if works:
        decision = loop.poll(seconds)
    else:
        loop.worker.clock += seconds
        loop.now += seconds
        decision = loop.poll(0.0)
    before = loop.deployment.status.traffic
    status = Status(traffic=traffic_section(before, decision.shown.figures))
    loop.deployment = replace(loop.deployment, status=status)
    return decision.shown.figures is not None


def test_figures_are_published_every_half_minute_under_traffic() -> None:
    loop = loop_over()
    published = [poll(loop, 10.0, works=True) for _ in range(13)]
    assert published[1:] == [True, False, False] * 4


def test_the_end_of_traffic_is_published_once_by_a_late_tick() -> None:
    """A planner that lags decides soon after the decision before, and the next poll is a minute away."""
    loop = loop_over()
    for _ in range(3):
        poll(loop, 60.0, works=True)
    assert poll(loop, 59.0, works=False), "the window has the last traffic"
    assert loop.deployment.status.traffic.running
    assert poll(loop, PUBLISH_SECONDS - 10, works=False)
    assert loop.deployment.status.traffic.running == 0
    assert loop.deployment.status.traffic.tokens_per_second == 0
    assert not poll(loop, PUBLISH_SECONDS - 10, works=False), "the figures of a deployment at rest are known"
