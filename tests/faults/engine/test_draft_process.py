"""A draft process that is killed while clients are served."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import Plan, TreeShape
from support.worker_process import StartWorker, WorkerProcess

PROMPTS = [f"request {i}: " + "abc " * i for i in range(6)]


@pytest.fixture
def worker(start_small: StartWorker, small_folder: Path) -> WorkerProcess:
    """Return a worker whose target is also its draft model, in a process of its own. Its guard is off."""
    worker = start_small("--method", "draft-model", "--draft", f"file://{small_folder}", "--draft-placement", "own")
    draft = worker.call_admin("/v1/report").json()["draft"]["hash"]
    plan = Plan(version=9, draft=draft, initial=TreeShape.chain(3), max_depth=3, explore=0, guard=False)
    assert worker.call_admin("/v1/plan", "PUT", content=plan.model_dump_json()).is_success
    return worker


def draft_pid(worker: WorkerProcess) -> int:
    children = Path(f"/proc/{worker.engine_pid}/task")
    pids = [pid for task in children.iterdir() for pid in (task / "children").read_text().split()]
    (pid,) = [int(one) for one in pids if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return pid


def complete(worker: WorkerProcess, prompt: str) -> dict[str, Any]:
    body = {"model": "small", "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{worker.public}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def texts(worker: WorkerProcess, then: Callable[[], None] = lambda: None) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(complete, worker, prompt) for prompt in PROMPTS]
        then()
        return [answer.result()["choices"][0]["text"] for answer in answers]


def accepted(worker: WorkerProcess) -> int:
    return int(worker.call_admin("/v1/report").json()["accepted_tokens"])


def problem(worker: WorkerProcess) -> str:
    return worker.call_admin("/v1/report").json()["draft"]["problem"] or ""


def test_a_killed_draft_process_fails_no_request(worker: WorkerProcess) -> None:
    wanted, pid = texts(worker), draft_pid(worker)
    assert accepted(worker) > 50
    worker.wait_until(lambda: not problem(worker))
    assert texts(worker, lambda: os.kill(pid, signal.SIGKILL)) == wanted
    assert "the draft process ended with exit code -9; requests decode plainly" in worker.log
    worker.wait_until(lambda: "Traceback" not in worker.log and texts(worker) == wanted and not problem(worker), 300)
    assert draft_pid(worker) != pid
    before = accepted(worker)
    assert texts(worker) == wanted
    assert accepted(worker) - before > 50
