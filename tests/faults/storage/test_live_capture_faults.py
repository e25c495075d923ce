"""Faults of capture that the plan switches on: a full disk, a slow one, and a hook that hangs.

The worker serves on, the report says why nothing is captured, and the next rules are tried at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from specdecode_worker.capture import ReadStats, read_records
from specdecode_worker.capture.segments import segment_name
from specdecode_worker.contract import Plan
from specdecode_worker.contract.capture import CaptureRules
from support.faults.bounds import healthy
from support.tiers import skip_reason
from support.worker_process import StartWorker, WorkerProcess

versions = count(1)
ANSWER_SECONDS = 2.0
"""Bound of the time of a short request during every fault."""


def push(worker: WorkerProcess, **rules: object) -> None:
    made = CaptureRules.model_validate({"share": 1.0, **rules})
    worker.put_plan(Plan(uid="uid-1", version=next(versions), capture=made))


def ask(worker: WorkerProcess, requests: int = 1, n: int = 1) -> None:
    """Send requests and check that none waits for the capture."""
    for _ in range(requests):
        began = time.monotonic()
        answer = worker.complete("hello " * 30, max_tokens=2, n=n, timeout=30)
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - began < ANSWER_SECONDS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(skip_reason("root", f"a file system cannot be mounted here: {mounted.stderr.strip()}"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_stops_capture_and_the_next_rules_are_tried(small_disk: Path, start_fake: StartWorker) -> None:
    folder, filler = small_disk / "captures", small_disk / "filler"
    worker = start_fake(capture_dir=str(folder))
    with healthy(worker):
        push(worker)
        ask(worker)
        worker.wait_until(lambda: worker.captured().conversations == 1)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        ask(worker, 8, n=4)
        worker.wait_until(lambda: "No space left" in (worker.captured().problem or ""))
        full = worker.captured()
        assert full.dropped["write_error"] == 1, "the disk is tried once"
        ask(worker, 3)
        assert worker.captured().dropped["stopped"] > full.dropped.get("stopped", 0)
        filler.unlink()
        push(worker, max_bytes=2**17)
        worker.wait_until(lambda: not worker_is_stopped(worker))
        ask(worker, 2)
        worker.wait_until(lambda: worker.captured().problem is None)
    stats = ReadStats()
    readable = len(list(read_records([folder], stats)))
    report = worker.captured()
    print(f"{report.conversations} stored, {readable} readable, {report.dropped} dropped, {stats.torn} torn segments")
    assert (readable, stats.torn, stats.unreadable) == (report.conversations, 0, 0)


def worker_is_stopped(worker: WorkerProcess) -> bool:
    """Return whether a request is still dropped because capture is stopped."""
    before = worker.captured().dropped.get("stopped", 0)
    ask(worker)
    return worker.captured().dropped.get("stopped", 0) > before


def test_slow_disk_delays_no_request(tmp_path: Path, start_fake: StartWorker) -> None:
    folder = tmp_path / "captures"
    worker = start_fake(capture_dir=str(folder))
    push(worker)
    ask(worker)
    worker.wait_until(lambda: worker.captured().conversations == 1)
    blocked = folder / segment_name(time.time() - 10)
    os.mkfifo(blocked)  # reading it waits, as on a disk that does not answer
    with healthy(worker):
        push(worker, max_bytes=2**20)
        ask(worker, 10)
        worker.wait_until(lambda: worker.captured().problem is not None, 30)
        ask(worker, 3)
        assert worker.captured().conversations <= 11
        blocked.open("wb").close()
        worker.wait_until(lambda: worker.captured().problem is None)
        worker.wait_until(lambda: worker.captured().conversations == 14)


def test_hook_that_hangs_stops_capture_only(tmp_path: Path, start_fake: StartWorker) -> None:
    folder = tmp_path / "captures"
    worker = start_fake(capture_dir=str(folder))
    with healthy(worker):
        push(worker, redact="support.worker.fake_engine:hang_in_hook")
        ask(worker, 3)
        worker.wait_until(lambda: "has not returned" in (worker.captured().problem or ""), 30)
        ask(worker, 3)
        worker.put_plan(Plan(uid="uid-1", version=next(versions)))
        worker.wait_until(lambda: worker.captured().problem is None and not list(folder.iterdir()))
        push(worker)
        ask(worker)
        worker.wait_until(lambda: worker.captured().conversations >= 1)
    worker.terminate()
    assert worker.exit_code(20) == 0, "a thread that hangs holds up no exit"
