"""Tests of the heartbeat: its writer, its phases, and a reader during writes."""

from __future__ import annotations

import multiprocessing
import threading

from specdecode_worker.engine.process import Heartbeat, HeartbeatBlock, HeartbeatWriter, Phase


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_recorded_with_its_size_and_its_time() -> None:
    block, clock = HeartbeatBlock(), Clock()
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
    block, clock = HeartbeatBlock(), Clock()
    writer = HeartbeatWriter(block, clock)
    writer.enter(Phase.STEP)
    with writer.during(Phase.SWAPPING):
        clock.now = 200
        assert block.read().phase is Phase.SWAPPING
    assert block.read().phase is Phase.IDLE
    assert block.read().longest_step_seconds == 0, "a swap is no step"


def test_a_spawned_process_shares_the_block() -> None:
    block = HeartbeatBlock()
    beat = Heartbeat(Phase.CAPTURING, 1, 2, 3, 4, 5, 6)
    child = multiprocessing.get_context("spawn").Process(target=block.write, args=(beat,))
    child.start()
    child.join(60)
    assert block.read() == beat


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
