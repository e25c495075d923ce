"""Captured text in the data of a run and of replayed runs: no older than allowed, and deleted with the verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from specdecode_worker.capture import Record
from specdecode_worker.capture.segments import Retention, store_retention
from specdecode_worker.training.distillation.pipeline import Distillation
from specdecode_worker.training.distillation.records import read_records_of
from support.worker.captured_folders import write
from support.worker.job_runs import read, run

pytestmark = pytest.mark.slow


def _fail_at_stage(flags: list[str], out: Path, message: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Run until ``stage`` of the pipeline, which fails as if the disk were full."""
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, stage, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert run(flags, out) == 0
    assert read(message).failure == "disk-full"


@pytest.mark.parametrize("stage", ["_train_student", "_compare_with_deployed"])
def test_resumed_run_goes_on_without_expired_text(
    stage: str, flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    now = time.time()
    aged = [msgspec.structs.replace(record, time_seconds=now - 5000 - i) for i, record in enumerate(records[:45])]
    fresh = [msgspec.structs.replace(record, time_seconds=now - i) for i, record in enumerate(records[45:])]
    capture = write(tmp_path / "dated", [*aged, *fresh])
    store_retention(capture, Retention(1e9, 2**24))
    flags[flags.index("--capture") + 1] = str(capture)
    out = tmp_path / "out"
    _fail_at_stage(flags, out, message, monkeypatch, stage)
    earlier = _stored_times(out)
    assert min(earlier) < now - 4000
    store_retention(capture, Retention(1000.0, 2**24))  # as if the run had been suspended until then
    _fail_at_stage(flags, out, message, monkeypatch, "_compare_with_deployed")
    left = _stored_times(out)
    assert min(left) > now - 1000
    assert left == [time for time in earlier if time > now - 1000]
    assert run(flags, out, "--keep-data") == 0
    assert read(message).verdict == "inconclusive"
    assert _stored_times(out) == left


def test_expired_text_of_an_earlier_run_is_deleted_and_not_replayed(
    flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    now = time.time()
    first = [msgspec.structs.replace(record, time_seconds=now - 5000) for record in records[:45]]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "old", first))
    assert run(flags, tmp_path / "first", "--keep-data") == 0
    assert read(message).verdict == "inconclusive"
    assert _stored_times(tmp_path / "first")
    fresh = [msgspec.structs.replace(record, time_seconds=now) for record in records[45:]]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "new", fresh))
    store_retention(tmp_path / "new", Retention(1000.0, 2**24))
    flags[flags.index("--replay-share") + 1] = "0.5"
    assert run(flags, tmp_path / "second", "--replay", str(tmp_path / "first")) == 0
    assert read(message).verdict == "inconclusive", "without replayed text the golden set judges alone"
    assert _stored_times(tmp_path / "first") == []


def _stored_times(out: Path) -> list[float]:
    """Return the times of all records whose text a run holds."""
    return sorted(record.time_seconds for path in (out / "data").rglob("*.records") for record in read_records_of(path))


def test_verdict_ends_the_captured_text_of_a_job(flags: list[str], tmp_path: Path, message: Path) -> None:
    assert run(flags, tmp_path / "out") == 0
    assert read(message).verdict == "inconclusive"
    assert not (tmp_path / "out" / "data").exists()
    assert run([*flags, "--keep-data"], tmp_path / "kept") == 0
    assert _stored_times(tmp_path / "kept")
