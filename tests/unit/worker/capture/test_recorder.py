"""Tests of the recorder: each offered record is written, redacted or counted, without blocking the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_worker.capture import Dropped, Recorder
from specdecode_worker.contract import CaptureRules
from support.worker.captures import read, record

HOOKS = "support.worker.redaction_hooks"


def recorder(folder: Path, **config: Any) -> Recorder:
    return Recorder(folder, CaptureRules(share=1.0, **config), seed=0)


def captured(folder: Path, hook: str, numbers: range) -> Recorder:
    made = recorder(folder, redact=f"{HOOKS}:{hook}")
    for number in numbers:
        made.enqueue(record(number), made.epoch)
    made.close()
    return made


def test_enqueued_records_are_on_disk_after_close(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    for number in range(50):
        made.enqueue(record(number, task="code" if number % 5 else "qa"), made.epoch)
    made.close()
    assert read(tmp_path) == [record(n, task="code" if n % 5 else "qa") for n in range(50)]
    assert made.counts.records == {"code": 40, "qa": 10}


def test_a_hook_can_change_and_drop_records(tmp_path: Path) -> None:
    captured(tmp_path / "a", "without_opening", range(2))
    assert [one.opening for one in read(tmp_path / "a")] == ["", ""]
    made = captured(tmp_path / "b", "odd_ones", range(10))
    assert [one.sampling.seed for one in read(tmp_path / "b")] == [1, 3, 5, 7, 9]
    assert made.counts.dropped == {Dropped.redacted: 5}


@pytest.mark.parametrize("hook", ["failing", "wrong", "spoiling"])
def test_failing_hook_drops_the_record_and_logs_no_content(
    hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = captured(tmp_path, hook, range(3))
    assert read(tmp_path) == []
    assert made.counts.dropped == {Dropped.redaction_error: 3}
    assert "secret" not in caplog.text


def test_record_larger_than_a_segment_is_dropped(tmp_path: Path) -> None:
    made = recorder(tmp_path, max_bytes=2**16)
    made.enqueue(record(1000, tokens=5000), made.epoch)
    made.enqueue(record(1), made.epoch)
    made.close()
    assert made.counts.dropped == {Dropped.too_large: 1}
    assert read(tmp_path) == [record(1)]


def test_deletion_of_a_user_reads_the_keys_of_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorder(tmp_path)
    made.enqueue(msgspec.structs.replace(record(0), user=made.subject_of("ann")), made.epoch)
    made.close()
    (key,) = tmp_path.glob("*.subject-key")
    reads: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *words: (reads.append(self), read_text(self, *words))[1])
    assert made.delete_user("ann").records == 1
    assert reads.count(key) == 1
