"""Tests of the stacks that a process writes at a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdecode_worker.engine.process import order_stacks, request_stacks

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
