"""Heartbeat of the engine process, the policy of its watchdog, and the stacks that it writes at a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from specdecode_worker.contract import ModelConfig, WorkerConfig
from specdecode_worker.core.messages import Crashed, Loaded, Shutdown
from specdecode_worker.engine import process
from specdecode_worker.engine.process import (
    MAX_POLL_GAP_SECONDS,
    SECONDS_PER_PREFILL_TOKEN,
    EngineWatchdog,
    Heartbeat,
    HeartbeatBlock,
    HeartbeatWriter,
    Phase,
    State,
    bound_seconds,
    order_stacks,
    request_stacks,
)
from support.clock import Clock
from support.worker.fake_engine import FakeEngine


def test_a_step_is_recorded_with_its_size_and_its_time() -> None:
    block, clock = HeartbeatBlock(), Clock(100.0)
    writer = HeartbeatWriter(block, clock)
    writer.enter(Phase.IDLE)
    clock.now = 101
    writer.enter(Phase.STEP)
    clock.now = 101.5
    writer.record_launch(3, 40)
    assert block.read() == Heartbeat(Phase.STEP, 101, 101.5, 1, 3, 40, 0)
    clock.now = 103
    writer.enter(Phase.STEP)
    assert block.read() == Heartbeat(Phase.STEP, 103, 103, 2, 0, 0, 2)
    clock.now = 104
    writer.enter(Phase.IDLE)
    clock.now = 105
    writer.enter(Phase.IDLE)
    assert block.read() == Heartbeat(Phase.IDLE, 104, 105, 2, 0, 0, 2), "an idle beat keeps the start of the phase"


def test_a_phase_within_the_loop_returns_to_idle() -> None:
    block, clock = HeartbeatBlock(), Clock(100.0)
    writer = HeartbeatWriter(block, clock)
    writer.enter(Phase.STEP)
    with writer.during(Phase.SWAPPING):
        clock.now = 200
        assert block.read().phase is Phase.SWAPPING
    assert block.read().phase is Phase.IDLE
    assert block.read().longest_step_seconds == 0, "a swap is no step"


def test_a_reader_never_sees_half_a_beat() -> None:
    block, stop = HeartbeatBlock(), threading.Event()
    block.write(Heartbeat(Phase.STEP, 0, 0, 0, 0, 0, 0))

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            block.write(Heartbeat(Phase.STEP, number, number, number, number, number, number))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2000):
            assert len({*block.read()[1:]}) == 1, "all fields are of one write"
    finally:
        stop.set()
        writer.join()


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
        (beat(Phase.SWAPPING, longest=100), 1000),
    ],
)
def test_bound_follows_phase_longest_step_and_prefill(heartbeat: Heartbeat, bound: float) -> None:
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


PROGRAM = """
import sys, time
from pathlib import Path
from specdecode_worker.engine.process import install_stack_dump

def stuck():
    print("stuck", flush=True)
    time.sleep(60)

install_stack_dump(Path(sys.argv[1]))
stuck()
"""


@pytest.fixture
def stuck_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "stacks")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"stuck\n"
    yield process
    process.kill()
    process.wait()


async def test_every_request_returns_the_stacks_of_now(stuck_process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    for _ in range(2):
        stacks = await request_stacks(stuck_process.pid, tmp_path / "stacks")
        assert stacks.startswith("Current thread")
        assert stacks.count("in stuck") == 1


@pytest.mark.slow
async def test_a_stopped_process_gives_no_stacks(stuck_process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    stuck_process.send_signal(signal.SIGSTOP)
    os.waitpid(stuck_process.pid, os.WUNTRACED)  # until it has stopped
    assert "its state is T (stopped)" in await request_stacks(stuck_process.pid, tmp_path / "stacks")


def test_the_interrupted_thread_comes_first() -> None:
    assert (
        order_stacks("Thread 0x1:\n  a\n\nCurrent thread 0x2:\n  b\n") == "Current thread 0x2:\n  b\n\nThread 0x1:\n  a"
    )


def test_an_engine_that_is_told_to_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several GPUs its graphs hold collectives, and the process group does not end before they are gone."""
    engine, port, closed = FakeEngine((1, 2, 3)), Mock(), Mock()
    port.receive.return_value = [Shutdown()]
    monkeypatch.setattr(engine, "close", closed)
    monkeypatch.setattr(process, "EnginePort", Mock(return_value=port))
    for name in ("install_stack_dump", "_prepare"):
        monkeypatch.setattr(process, name, lambda *_: None)
    config = WorkerConfig(model=ModelConfig(uri="file:///target", served_name="target"))
    loaded = Loaded(max_model_len=64, target="t", draft_hash="d")
    build: Any = lambda _: (engine, loaded)  # noqa: E731
    process.main("", config.model_dump_json(), None, None, build, HeartbeatBlock(), "")
    closed.assert_called_once()
    assert not any(isinstance(message, Crashed) for sent in port.send.call_args_list for message in sent.args[0])
