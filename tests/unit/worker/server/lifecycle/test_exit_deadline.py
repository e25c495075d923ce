"""Tests of the deadline of the process, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys, threading, time
from specdecode_worker.server.listening import ExitDeadline

print("imported", flush=True)
deadline = ExitDeadline()
deadline.set(0.5)
deadline.set(30)
deadline.code = 3
threading.Thread(target=time.sleep, args=(float(sys.argv[1]),)).start()
sys.exit(4)
"""


@pytest.mark.parametrize(("busy_seconds", "code"), [(20, 3), (0, 4)])
def test_a_busy_thread_does_not_hold_the_process(busy_seconds: float, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(busy_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        assert process.wait(60) == code
        assert time.monotonic() - began < 15
