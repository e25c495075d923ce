"""Retention while no worker runs: readers and the command delete what has expired."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.capture import ReadStats, read_records
from specdecode_worker.capture.records import encode
from specdecode_worker.capture.segments import Retention, SegmentWriter, list_segments, stored_retention
from support.worker.captured import record

AGE_SECONDS = 160.0


def write(folder: Path, seconds: list[float]) -> None:
    """Write one segment for each time, as a worker that no longer runs."""
    for number, began in enumerate(seconds):
        segments = SegmentWriter(folder, Retention(1e12, 2**20), clock=lambda began=began: began)
        segments.append(encode(record(number)))
        segments.close()
    SegmentWriter(folder, Retention(AGE_SECONDS, 2**20))


def numbers(folder: Path, now: float) -> list[int]:
    return [one.sampling.seed for one in read_records([folder], ReadStats(), clock=lambda: now)]


def test_a_reader_deletes_what_has_expired(tmp_path: Path) -> None:
    write(tmp_path, [1000, 1100, 1200])
    assert stored_retention(tmp_path) == Retention(AGE_SECONDS, 2**20)
    assert numbers(tmp_path, now=1140) == [0, 1, 2]
    assert numbers(tmp_path, now=1161) == [1, 2]
    assert len(list_segments(tmp_path)) == 2


def test_a_reader_leaves_out_what_it_cannot_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [1000, 1200])
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "read-only")))
    assert numbers(tmp_path, now=1300) == [1]


def test_without_stored_bounds_everything_is_read(tmp_path: Path) -> None:
    write(tmp_path, [1000])
    (tmp_path / "retention.json").write_text("[")
    assert numbers(tmp_path, now=1e9) == [0]


def test_the_command_deletes_what_has_expired(tmp_path: Path, capsys: Any) -> None:
    now = time.time()
    write(tmp_path, [now - 1000, now - 150, now])
    leftover = tmp_path / "x.rewrite"
    leftover.touch()
    os.utime(leftover, (now - 9999, now - 9999))
    assert main(["capture", "sweep", str(tmp_path)]) == 0
    assert "2 expired segments deleted" in capsys.readouterr().out
    assert not leftover.exists()
    assert main(["capture", "sweep", str(tmp_path), "--max-age", "0.001"]) == 0
    assert list_segments(tmp_path) == []


def test_the_command_names_a_folder_without_bounds(tmp_path: Path, capsys: Any) -> None:
    assert main(["capture", "sweep", str(tmp_path), str(tmp_path / "missing")]) == 1
    error = capsys.readouterr().err
    assert "give the maximum age with --max-age" in error
    assert "missing is no folder" in error
