"""No process of a worker outlives it, whichever part was killed and whatever was restarted before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from specdecode_worker.contract import Plan, TreeShape
from support.faults.bounds import SIGTERM_EXTRA_SECONDS
from support.processes import children, has_ended, spawned
from support.tiers import crowding
from support.worker_process import StartWorker, WorkerProcess

SECONDS = 5.0
"""Bound of the time from the loss of the server or of the engine to the end of the last process.

A process that still imports torch ends once it has, which takes some seconds.
"""


def descendants(pid: int) -> dict[int, str]:
    found = children(pid)
    for child in list(found):
        found |= descendants(child)
    return found


def assert_all_end(processes: dict[int, str]) -> None:
    began = time.monotonic()
    deadline = began + SECONDS * crowding()
    while alive := {pid: words for pid, words in processes.items() if not has_ended(pid)}:
        assert time.monotonic() < deadline, f"{len(alive)} of {len(processes)} are left: {alive}"
        time.sleep(0.05)
    print(f"{len(processes)} processes gone after {time.monotonic() - began:.2f} s")


def ask(worker: WorkerProcess) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "ignore_eos": True}
    answer = httpx.post(f"{worker.public}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.fixture(params=["draft", "ranks"])
def worker(request: pytest.FixtureRequest, start_small: StartWorker, small_folder: Path) -> Iterator[WorkerProcess]:
    """Yield a worker with a draft process or with two ranks, after a chat request, which needs a template process."""
    flags = {
        "draft": ("--method", "draft-model", "--draft", f"file://{small_folder}", "--draft-placement", "own"),
        "ranks": ("--tensor-parallel-size", "2"),
    }
    worker = start_small(*flags[request.param])
    ask(worker)
    processes = descendants(worker.process.pid)
    assert sum("template_process" in words for words in processes.values()) == 1, processes
    assert len(spawned(worker.engine_pid)) == 1, processes
    yield worker
    for pid in processes:  # those that a failed test has left
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_after_the_server_is_killed(worker: WorkerProcess) -> None:
    """The engine and its child are stopped, as if they hung in a driver, so that no code of theirs can end them."""
    processes = descendants(worker.process.pid)
    for pid in (worker.engine_pid, *spawned(worker.engine_pid)):
        os.kill(pid, signal.SIGSTOP)
    worker.process.kill()
    assert_all_end(processes)


def test_after_the_engine_is_killed(worker: WorkerProcess) -> None:
    processes = descendants(worker.process.pid)
    os.kill(worker.engine_pid, signal.SIGKILL)
    assert worker.exit_code(60) == 1, worker.log
    assert_all_end(processes)


def test_after_sigterm(worker: WorkerProcess) -> None:
    """An idle worker needs neither its grace period nor force."""
    processes, began = descendants(worker.process.pid), time.monotonic()
    worker.terminate()
    assert worker.exit_code(60) == 0, worker.log
    assert_all_end(processes)
    assert time.monotonic() - began < SIGTERM_EXTRA_SECONDS * crowding()


@pytest.mark.parametrize("worker", ["draft"], indirect=True)
def test_after_a_restart_of_the_draft_process(worker: WorkerProcess) -> None:
    draft = worker.report().draft.hash
    worker.put_plan(Plan(version=9, draft=draft, initial=TreeShape.chain(3), max_depth=3, explore=0, guard=False))
    (first,) = spawned(worker.engine_pid)
    os.kill(first, signal.SIGKILL)

    def restarted() -> bool:
        ask(worker)  # an idle engine does not notice the loss
        return any(pid != first for pid in spawned(worker.engine_pid))

    worker.wait_until(restarted, 60)
    processes = descendants(worker.process.pid)
    worker.process.kill()
    assert_all_end(processes)


def test_while_the_engine_loads(small_folder: Path) -> None:
    words = [sys.executable, "-m", "specdecode_worker", "serve", "--port", "0", "--admin-port", "0"]
    words += ["--model", f"file://{small_folder}"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        while not spawned(server.pid):
            assert server.poll() is None
            time.sleep(0.01)
        processes = descendants(server.pid)
        server.kill()
    assert_all_end(processes)
