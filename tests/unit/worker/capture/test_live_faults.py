"""Faults of live capture: it stops, says why and tries again. No call of the event loop waits."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdecode_worker.capture import CaptureError, Dropped, Recorder
from specdecode_worker.capture.live import MAX_HUNG_WRITERS
from specdecode_worker.capture.records import QUEUE_RECORDS
from specdecode_worker.contract.capture import CaptureRules
from support.worker.live_captures import LIMITS, RULES, live, numbers, put, stored, wait

HANGING = RULES.model_copy(update={"redact": "support.worker.redaction_hooks:hanging"})


def problem_of(recorder: Recorder) -> str:
    return recorder.report().problem or ""


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Yield a list; while its entry is true, no record can be written."""
    from specdecode_worker.capture import segments

    full, write = [True], segments._write_whole

    def write_or_fail(file: int, content: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        write(file, content)

    monkeypatch.setattr(segments, "_write_whole", write_or_fail)
    return full


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event; until it is set, a write does not return."""
    from specdecode_worker.capture import segments

    answers, write = threading.Event(), segments._write_whole

    def write_later(file: int, content: bytes) -> None:
        answers.wait(60)
        write(file, content)

    monkeypatch.setattr(segments, "_write_whole", write_later)
    yield answers
    answers.set()


def test_full_disk_stops_capture_until_the_retry(tmp_path: Path, full_disk: list[bool]) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0)
        wait(lambda: "No space left" in problem_of(recorder))
        wait(lambda: recorder.counts.dropped[Dropped.write_error] == 1)
        full_disk[0] = False
        wait(lambda: recorder.should_capture("other"))
        put(recorder, 1)
        stored(recorder, 1)
        assert problem_of(recorder) == ""
    assert numbers(tmp_path) == [1]


def test_changed_rules_are_tried_at_once(tmp_path: Path, full_disk: list[bool]) -> None:
    patient = type(LIMITS)(retry=3600, hang=0.3, tick=0.02)
    with live(tmp_path, limits=patient) as recorder:
        put(recorder, 0)
        wait(lambda: problem_of(recorder))
        assert not recorder.should_capture("other")
        put(recorder, 1)
        assert recorder.counts.dropped[Dropped.stopped] == 2
        full_disk[0] = False
        recorder.apply(RULES.model_copy(update={"share": 0.999}))
        wait(lambda: not recorder._control.is_stopped)
        put(recorder, 2)
        stored(recorder, 1)
    assert numbers(tmp_path) == [2]


def test_slow_disk_delays_no_call(tmp_path: Path, slow_disk: threading.Event) -> None:
    with live(tmp_path) as recorder:
        began = time.monotonic()
        put(recorder, *range(QUEUE_RECORDS + 50))
        recorder.report()
        recorder.apply(RULES.model_copy(update={"share": 0.5}))
        assert time.monotonic() - began < 2
        assert recorder.counts.dropped[Dropped.queue_full] >= 49
        wait(lambda: "has not answered" in problem_of(recorder))
        with pytest.raises(CaptureError, match="does not answer"):
            recorder.delete_user("ann")
        slow_disk.set()
        stored(recorder, QUEUE_RECORDS + 50 - recorder.counts.dropped[Dropped.queue_full])
        assert problem_of(recorder) == ""


def test_capture_can_be_switched_off_while_the_disk_is_slow(tmp_path: Path, slow_disk: threading.Event) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, 1)
        recorder.apply(None)
        assert not recorder.should_capture("other")
        slow_disk.set()
        wait(lambda: not list(tmp_path.iterdir()))
        time.sleep(0.1)
        assert not list(tmp_path.iterdir()), "nothing is written afterwards"


def test_hanging_redaction_stops_capture_and_writes_nothing_later(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, HANGING) as recorder:
        put(recorder, 0, 1)
        wait(lambda: "has not returned" in problem_of(recorder))
        assert recorder.report().dropped == {"stopped": 2}
        time.sleep(3 * LIMITS.retry)
        assert len([one for one in threading.enumerate() if one.name == "capture"]) == 1, "one hangs, no other starts"
        recorder.apply(RULES)
        wait(lambda: recorder.should_capture("other"))
        put(recorder, 2)
        stored(recorder, 1)
        held.set()
        time.sleep(0.1)
        assert numbers(tmp_path) == [2]


def test_hook_that_returns_is_used_again(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, HANGING) as recorder:
        put(recorder, 0)
        wait(lambda: problem_of(recorder))
        held.set()
        wait(lambda: not problem_of(recorder))
        put(recorder, 1)
        stored(recorder, 1)
    assert numbers(tmp_path) == [1]


def test_capture_can_be_switched_off_while_redaction_hangs(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, RULES) as recorder:
        put(recorder, 0)
        stored(recorder, 1)
        recorder.apply(HANGING)
        put(recorder, 1)
        wait(lambda: len(recorder._queue) == 0)
        recorder.apply(None)
        wait(lambda: not list(tmp_path.iterdir()))
        assert recorder.report().problem is None


def test_threads_that_hang_are_bounded(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, HANGING) as recorder:
        for _ in range(2 * MAX_HUNG_WRITERS):
            put(recorder, 0)
            recorder.apply(None)
            recorder.apply(HANGING)
            time.sleep(0.05)
        assert len([one for one in threading.enumerate() if one.name == "capture"]) <= MAX_HUNG_WRITERS
    held.set()


def test_redaction_that_cannot_be_loaded_is_reported_and_tried_again(tmp_path: Path) -> None:
    module = tmp_path / "late_hooks.py"
    sys.path.insert(0, str(tmp_path))
    rules = RULES.model_copy(update={"redact": "late_hooks:hook"})
    try:
        with live(tmp_path / "captures", rules) as recorder:
            wait(lambda: "late_hooks:hook cannot be imported" in problem_of(recorder))
            put(recorder, 0)
            module.write_text("def hook(record):\n    return record\n")
            wait(lambda: not problem_of(recorder))
            put(recorder, 1)
            stored(recorder, 1)
            assert numbers(tmp_path / "captures") == [1], "nothing is written without the hook"
    finally:
        sys.path.remove(str(tmp_path))


def test_thread_that_ends_is_replaced_and_its_message_is_not_reported(tmp_path: Path) -> None:
    rules = RULES.model_copy(update={"redact": "support.worker.redaction_hooks:ending"})
    with live(tmp_path, rules) as recorder:
        put(recorder, 0)
        wait(lambda: problem_of(recorder) == "the capture thread ended with SystemExit")
        assert recorder.counts.dropped[Dropped.redaction_error] == 1
        recorder.apply(RULES)
        wait(lambda: recorder.should_capture("other"))
        put(recorder, 1)
        stored(recorder, 1)


def test_folder_that_cannot_be_written_is_reported_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.write_text("a file")
    with live(folder) as recorder:
        wait(lambda: "cannot be written" in problem_of(recorder))
        assert not recorder.should_capture("other")
        folder.unlink()
        wait(lambda: not problem_of(recorder))
        put(recorder, 0)
        stored(recorder, 1)
        shutil.rmtree(folder)
        put(recorder, 1)
        wait(lambda: folder.exists() and numbers(folder) == [1])


def test_segment_that_cannot_be_rewritten_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with live(tmp_path) as recorder:
        put(recorder, 0, age=100)
        put(recorder, 1)
        stored(recorder, 2)
        monkeypatch.setattr(os, "fchmod", refuse)
        recorder.apply(CaptureRules(share=1.0, delete_before=time.time() - 50))
        stored(recorder, 0)
        put(recorder, 2)
        stored(recorder, 1)
    assert numbers(tmp_path) == [2]


@pytest.mark.parametrize("step", ["open", "sweep", "delete_forbidden"])
def test_capture_goes_on_after_a_failure_of_the_control_thread(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with live(tmp_path) as recorder:
        put(recorder, 0)
        stored(recorder, 1)
        with monkeypatch.context() as broken:
            broken.setattr(recorder._store, step, refuse)
            recorder._control._swept_at = 0.0
            recorder.apply(RULES.model_copy(update={"share": 0.999, "max_bytes": 2**20}))
            wait(lambda: "Input/output error" in problem_of(recorder))
            assert recorder._control.is_stopped
        wait(lambda: not problem_of(recorder) and not recorder._control.is_stopped)
        put(recorder, 1)
        stored(recorder, 2)
    assert numbers(tmp_path) == [0, 1]
