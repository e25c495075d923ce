"""Tests of the watchdog's policy: bounds by phase and step, and the way from ok to hung."""

from __future__ import annotations

import pytest

from specdecode_worker.engine.process import (
    MAX_POLL_GAP_SECONDS,
    PHASE_SECONDS,
    SECONDS_PER_PREFILL_TOKEN,
    EngineWatchdog,
    Heartbeat,
    Phase,
    State,
    bound_seconds,
)


def beat(phase: Phase = Phase.STEP, at: float = 0.0, *, prefill: int = 0, longest: float = 0.0) -> Heartbeat:
    return Heartbeat(phase, at, at, 7, 3, prefill, longest)


@pytest.mark.parametrize(
    ("heartbeat", "bound"),
    [
        (beat(), 60),
        (beat(longest=5), 60),
        (beat(longest=9), 90),
        (beat(prefill=512), 60),
        (beat(prefill=8192), 8192 * SECONDS_PER_PREFILL_TOKEN),
        (beat(Phase.IDLE, longest=9), 60),
        (beat(Phase.LOADING), None),
        *((beat(phase), seconds) for phase, seconds in PHASE_SECONDS.items()),
        (beat(Phase.SWAPPING, longest=100), 1000),
    ],
)
def test_bound_follows_phase_longest_step_and_prefill(heartbeat: Heartbeat, bound: float | None) -> None:
    assert bound_seconds(heartbeat, 60) == bound


def test_every_phase_has_a_bound_but_loading() -> None:
    assert {phase for phase in Phase if bound_seconds(beat(phase), 60) is None} == {Phase.LOADING}


def states(heartbeat: Heartbeat, *times: float) -> list[State]:
    watchdog = EngineWatchdog(4)
    return [watchdog.observe(heartbeat, now).state for now in times]


def test_silence_makes_an_engine_suspect_and_then_hung() -> None:
    assert states(beat(), 1, 1.9, 2, 3.9, 4) == [State.OK, State.OK, State.SUSPECT, State.SUSPECT, State.HUNG]


def test_one_late_reading_makes_no_engine_hung() -> None:
    assert states(beat(), 0, 4.5, 4.6) == [State.OK, State.SUSPECT, State.HUNG]


def test_an_engine_that_goes_on_is_ok_again() -> None:
    watchdog = EngineWatchdog(4)
    assert watchdog.observe(beat(), 2).state is State.SUSPECT
    assert watchdog.observe(beat(at=2.5), 3).state is State.OK


def test_silence_begins_again_after_the_watchdog_itself_was_stopped() -> None:
    resumed = 1 + 10 * MAX_POLL_GAP_SECONDS
    times = (1, resumed, resumed + 1, resumed + 2, resumed + 4)
    assert states(beat(), *times) == [State.OK, State.OK, State.OK, State.SUSPECT, State.HUNG]


def test_loading_is_never_hung() -> None:
    assert states(beat(Phase.LOADING), *range(0, 4000, 4)) == [State.OK] * 1000


def test_the_text_has_the_facts() -> None:
    watchdog = EngineWatchdog(4)
    text = str(watchdog.observe(beat(prefill=12, longest=0.25), 3))
    for fact in ("3.0 s", "bound 4.0 s", "phase step", "step 7", "3 rows", "12 prefill tokens", "0.25 s"):
        assert fact in text
