"""Silence after which a worker is suspected."""

from __future__ import annotations

import pytest

from specdecode_router.relay.silence_monitor import SWEEP_SECONDS, SilenceMonitor
from specdecode_router.relay.suspicion import WorkerSigns, is_suspect, silence_bound
from specdecode_router.settings import RouterSettings

LIMITS = RouterSettings(min_silence_seconds=1, max_silence_seconds=10)


@pytest.mark.parametrize(
    ("alive", "longest", "factor", "bound"),
    [(0.25, 0.01, 1, 1.01), (0.01, 0.0, 1, 1), (0.25, 3.0, 1, 4), (0.25, 60.0, 1, 10), (0.25, 60.0, 4, 40)],
)
def test_bound(alive: float, longest: float, factor: float, bound: float) -> None:
    assert silence_bound(alive, longest, LIMITS, factor) == pytest.approx(bound)


def test_frames_that_stop() -> None:
    signs = WorkerSigns(last_frame=100.0)
    assert not is_suspect(signs, 100.9, 0.25, LIMITS)
    assert is_suspect(signs, 101.1, 0.25, LIMITS)
    assert not is_suspect(signs, 101.1, 0.25, LIMITS, factor=2)


def test_engine_that_hangs_inside_of_a_step() -> None:
    signs = WorkerSigns(last_frame=100.0)
    for quarter in range(80):
        signs.last_frame = 100 + quarter / 4
        signs.observe_alive(min(quarter, 3), 0.05, signs.last_frame)
    assert signs.step_since == 100.75
    assert is_suspect(signs, 119.8, 0.25, LIMITS)
    signs.observe_alive(4, 0.05, 119.8)
    assert not is_suspect(signs, 119.9, 0.25, LIMITS)


def test_long_steps_are_no_hang() -> None:
    signs = WorkerSigns(last_frame=100.0)
    signs.observe_alive(1, 5.0, 100.0)
    signs.last_frame = 130.0
    assert not is_suspect(signs, 130.1, 0.25, LIMITS)


def test_pause_makes_the_signs_old() -> None:
    signs = WorkerSigns(last_frame=100.0)
    signs.observe_alive(1, 0.05, 100.0)
    signs.end_pause(150.0)
    assert not is_suspect(signs, 150.5, 0.25, LIMITS)


async def test_a_late_sweep_suspects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, SWEEP_SECONDS, 10.0, 10.0 + SWEEP_SECONDS])
    checked: list[float] = []

    class Request:
        def check_silence(self, now: float) -> None:
            checked.append(now)

    async def no_sleep(seconds: float) -> None:
        return None

    monkeypatch.setattr("specdecode_router.relay.silence_monitor.asyncio.sleep", no_sleep)
    monitor = SilenceMonitor(lambda: next(times))
    monitor.add(Request().check_silence)
    with pytest.raises(RuntimeError):  # the clock ends
        await monitor.run()
    assert checked == [SWEEP_SECONDS, 10.0 + SWEEP_SECONDS]
