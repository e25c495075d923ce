"""A draft process that is killed while clients are served, and errors and signals that end the whole worker."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import Plan, TreeShape
from support.faults.bounds import SIGTERM_EXTRA_SECONDS
from support.processes import has_ended, spawned
from support.worker import fake_engine
from support.worker_process import StartWorker, WorkerProcess

PROMPTS = [f"request {i}: " + "abc " * i for i in range(6)]


@pytest.fixture
def worker(start_small: StartWorker, small_folder: Path) -> WorkerProcess:
    """Return a worker whose target is also its draft model, in a process of its own. Its guard is off."""
    worker = start_small("--method", "draft-model", "--draft", f"file://{small_folder}", "--draft-placement", "own")
    draft = worker.report().draft.hash
    worker.put_plan(Plan(version=9, draft=draft, initial=TreeShape.chain(3), max_depth=3, explore=0, guard=False))
    return worker


def draft_pid(worker: WorkerProcess) -> int:
    (pid,) = spawned(worker.engine_pid)
    return pid


def texts(worker: WorkerProcess, then: Callable[[], None] = lambda: None) -> list[str]:
    fields: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True, "timeout": 300}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(worker.complete, prompt, **fields) for prompt in PROMPTS]
        then()
        return [one.result().raise_for_status().json()["choices"][0]["text"] for one in answers]


def test_a_killed_draft_process_fails_no_request(worker: WorkerProcess) -> None:
    wanted, pid = texts(worker), draft_pid(worker)
    assert worker.report().accepted_tokens > 50
    worker.wait_until(lambda: not worker.report().draft.problem)
    assert texts(worker, lambda: os.kill(pid, signal.SIGKILL)) == wanted
    assert "the draft process ended with exit code -9; requests decode plainly" in worker.log
    worker.wait_until(
        lambda: "Traceback" not in worker.log and texts(worker) == wanted and not worker.report().draft.problem, 300
    )
    assert draft_pid(worker) != pid
    before = worker.report().accepted_tokens
    assert texts(worker) == wanted
    assert worker.report().accepted_tokens - before > 50


EXIT_SECONDS = 8.0
"""Time from the error to the end of the worker: one second for probes, the rest for clients and noise."""


def put_plan(worker: WorkerProcess, folder: Path) -> None:
    plan = Plan(uid="uid-1", version=9, max_depth=fake_engine.STICKY_DEPTH)
    worker.call_admin("/v1/plan", "PUT", content=plan.model_dump_json(), timeout=EXIT_SECONDS)


def put_draft(worker: WorkerProcess, folder: Path) -> None:
    draft = {"method": "eagle3", "uri": fake_engine.write_draft(folder, fake_engine.STICKY_DRAFT.strip("/"))}
    assert worker.call_admin("/v1/draft", "PUT", json=draft, timeout=EXIT_SECONDS).status_code == 202


def run_step(worker: WorkerProcess, folder: Path) -> None:
    _ask(worker, [fake_engine.STICKY_STEP])


@pytest.mark.parametrize("provoke", [put_plan, put_draft, run_step])
def test_sticky_device_error_ends_the_worker(
    start_fake: StartWorker, provoke: Callable[[WorkerProcess, Path], None], tmp_path: Path
) -> None:
    """After such an error the device cannot be used any more, whichever call raised it."""
    worker = start_fake()
    assert worker.admin_token
    engine_pid, began = worker.engine_pid, time.monotonic()
    with contextlib.suppress(httpx.HTTPError):
        provoke(worker, tmp_path)
    worker.wait_until(lambda: has_ended(engine_pid), EXIT_SECONDS)
    engine_seconds = time.monotonic() - began
    assert worker.exit_code(EXIT_SECONDS) == 1
    print(f"engine gone after {engine_seconds:.1f} s, worker after {time.monotonic() - began:.1f} s")
    assert engine_seconds < EXIT_SECONDS / 2
    assert fake_engine.STICKY_ERROR in worker.termination_message


GRACE_SECONDS = 2.0


def test_sigterm_with_busy_tokenizer_threads(start_fake: StartWorker) -> None:
    worker = start_fake(grace_period_seconds=GRACE_SECONDS, endpoint_delay_seconds=0)
    for _ in range(8):
        threading.Thread(target=_ask, args=(worker, "BUSY", 60), daemon=True).start()
    time.sleep(1)
    began = time.monotonic()
    worker.terminate()
    worker.exit_code(90)
    seconds = time.monotonic() - began
    print(f"exit {seconds:.1f} s after SIGTERM with {GRACE_SECONDS} s of grace")
    assert seconds <= GRACE_SECONDS + SIGTERM_EXTRA_SECONDS


def test_drained_worker_exits(start_fake: StartWorker) -> None:
    worker, began = start_fake(endpoint_delay_seconds=0.5), time.monotonic()
    assert worker.call_admin("/v1/drain", "POST").status_code == 202
    assert worker.exit_code(10) == 0, worker.log
    print(f"exit {time.monotonic() - began:.1f} s after the drain began")


def _ask(worker: WorkerProcess, prompt: object, timeout: float = EXIT_SECONDS) -> None:
    """Send a request that may get no answer."""
    with contextlib.suppress(httpx.HTTPError):
        worker.complete(prompt, timeout=timeout)


def assert_ends(worker: WorkerProcess, began: float, reason: str) -> None:
    """Assert that a worker ends because a part of its server process that must live has ended."""
    assert worker.exit_code(EXIT_SECONDS) == 1, worker.log
    print(f"worker gone after {time.monotonic() - began:.1f} s: {worker.termination_message}")
    assert reason in worker.termination_message
    assert reason in worker.log


def test_dead_reader_task_ends_the_worker(start_fake: StartWorker) -> None:
    worker, began = start_fake(), time.monotonic()
    _ask(worker, [fake_engine.UNREADABLE])
    assert_ends(worker, began, "reader of the engine's messages")


def test_dead_listener_ends_the_worker(start_fake: StartWorker, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    worker, began = start_fake(environment={"PLANTED_LISTENER_FAILURE": str(trigger)}), time.monotonic()
    trigger.touch()
    assert_ends(worker, began, "listener")
