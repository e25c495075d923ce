"""Capture on a full disk: serving goes on, every counted record can be read, and capture recovers."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import httpx

from specdecode_worker.capture import ReadStats, read_records
from support.faults.bounds import healthy
from support.worker_process import StartWorker, WorkerProcess

CHOICES = 4
"""Records of one request."""
COMPLETION = {"model": "small", "prompt": "hello " * 30, "max_tokens": 2, "temperature": 0, "n": CHOICES}
PAGE_BYTES = 4096


def test_capture_on_a_full_disk_counts_only_what_can_be_read(small_disk: Path, start_small: StartWorker) -> None:
    capture, filler = small_disk / "capture", small_disk / "filler"
    worker = start_small("--capture", str(capture))
    _fill(filler)
    with healthy(worker):
        _complete(worker, 1)  # not even the head of a segment fits
        _wait(lambda: _metric(worker, "dropped_total", "write_error") == CHOICES)
        os.truncate(filler, filler.stat().st_size - PAGE_BYTES)
        _complete(worker, 4)  # the disk is full again amid a frame
        _wait(lambda: _seen(worker) == 5 * CHOICES)
        full = _metric(worker, "dropped_total", "write_error")
        assert CHOICES < full < 5 * CHOICES, "the disk takes some of the records"
        filler.unlink()
        _complete(worker, 1)
        _wait(lambda: _seen(worker) == 6 * CHOICES)
        assert _metric(worker, "dropped_total", "write_error") == full, "capture recovers when there is space"
    counted = _metric(worker, "records_total", "")
    stats = ReadStats()
    readable = len(list(read_records([capture], stats)))
    print(f"{counted} records counted, {readable} readable, {full} dropped, {stats.torn} torn segments")
    assert (readable, stats.torn, stats.unreadable) == (counted, 0, 0)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * PAGE_BYTES)


def _complete(worker: WorkerProcess, count: int) -> None:
    for _ in range(count):
        answer = httpx.post(f"{worker.public}/v1/completions", json=COMPLETION, timeout=30)
        assert answer.status_code == 200, answer.text


def _seen(worker: WorkerProcess) -> int:
    return _metric(worker, "records_total", "") + _metric(worker, "dropped_total", "write_error")


def _metric(worker: WorkerProcess, name: str, label: str) -> int:
    lines = worker.get("/metrics").text.splitlines()
    samples = [line for line in lines if line.startswith(f"specdecode_capture_{name}{{") and label in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in samples)


def _wait(condition: object, seconds: float = 10) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
