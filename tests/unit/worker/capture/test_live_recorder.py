"""Capture that follows the plan's rules: on, off, other rules, redaction, deletions and reports.

At a fault it stops, says why and tries again, and no call of the event loop waits.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from specdecode_worker.capture import CaptureError, Dropped, Recorder, segments
from specdecode_worker.capture.recorder import MAX_HUNG_WRITERS
from specdecode_worker.capture.records import QUEUE_RECORDS
from specdecode_worker.capture.segments import KEY_SUFFIX, derived_key, key_id, stored_keys, stored_retention
from specdecode_worker.contract.capture import CaptureReport, CaptureRules
from support.waiting import until
from support.worker import redaction_hooks
from support.worker.captures import LIMITS, RULES, live, numbers, put, read, record, stored

HOOKS = "support.worker.redaction_hooks"


def changed(**values: object) -> CaptureRules:
    return RULES.model_copy(update=values)


HANGING = changed(redact=f"{HOOKS}:hanging")


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Yield the event until which the hook `hanging` does not return."""
    redaction_hooks.HELD.clear()
    yield redaction_hooks.HELD
    redaction_hooks.HELD.set()


def test_rules_switch_capture_on_and_off(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    with live(folder, None) as recorder:
        assert not recorder.should_capture("other")
        put(recorder, 0)
        recorder.apply(RULES)
        assert recorder.should_capture("other"), "from the next request on"
        put(recorder, 1, 2)
        stored(recorder, 2)
        assert numbers(folder) == [1, 2]
        recorder.apply(None)
        assert not recorder.should_capture("other")
        put(recorder, 3)
        until(lambda: not list(folder.iterdir()))
        until(lambda: recorder.report() == CaptureReport(dropped={"deleted": 2}))  # counted after the last file is gone
        recorder.apply(RULES)
        put(recorder, 4)
        stored(recorder, 1)
        assert numbers(folder) == [4]


def test_plan_decides_about_records_of_an_earlier_process(tmp_path: Path) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, 1)
    with live(tmp_path) as recorder:
        stored(recorder, 2)
        put(recorder, 2)
        stored(recorder, 3)
    assert numbers(tmp_path) == [0, 1, 2]
    with live(tmp_path, None):
        until(lambda: not list(tmp_path.iterdir()))


def test_shares_hold_from_the_next_request_on(tmp_path: Path) -> None:
    with live(tmp_path) as recorder:
        recorder.apply(changed(share=0.0, task_shares={"code": 0.5}))
        taken = {task: sum(recorder.should_capture(task) for _ in range(1000)) for task in ("code", "qa")}
        assert taken["qa"] == 0
        assert 400 < taken["code"] < 600
        assert recorder.share_of("code") == 0.5


def test_record_that_waits_for_the_disk_passes_the_new_redaction(tmp_path: Path) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 1)
        stored(recorder, 1)
        with recorder._store.lock:
            put(recorder, 2)
            until(lambda: recorder._writer.activity() is not None)  # type: ignore[union-attr]
            recorder.apply(changed(redact=f"{HOOKS}:odd_ones"))
        until(lambda: recorder.counts.dropped == {Dropped.redacted: 1})
    assert numbers(tmp_path) == [1]


def test_a_hook_can_change_records_which_are_on_disk_after_close(tmp_path: Path) -> None:
    with live(tmp_path, changed(redact=f"{HOOKS}:without_opening")) as recorder:
        put(recorder, *range(50))
    assert [(one.sampling.seed, one.opening) for one in read(tmp_path)] == [(number, "") for number in range(50)]


@pytest.mark.parametrize("hook", ["failing", "wrong", "spoiling"])
def test_failing_hook_drops_the_record_and_logs_no_content(
    hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live(tmp_path, changed(redact=f"{HOOKS}:{hook}")) as recorder:
        put(recorder, 0, 1, 2)
    assert read(tmp_path) == []
    assert recorder.counts.dropped == {Dropped.redaction_error: 3}
    assert "secret" not in caplog.text


def test_record_larger_than_a_segment_is_dropped(tmp_path: Path) -> None:
    with live(tmp_path, changed(max_bytes=2**16)) as recorder:
        put(recorder, 0, tokens=5000)
        put(recorder, 1)
    assert recorder.counts.dropped == {Dropped.too_large: 1}
    assert numbers(tmp_path) == [1]


def test_records_before_the_time_are_deleted_and_the_others_stay(tmp_path: Path) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, age=100)
        put(recorder, 1, age=10)
        stored(recorder, 2)
        began = time.monotonic()
        recorder.apply(changed(delete_before=time.time() - 50))
        stored(recorder, 1)
        assert time.monotonic() - began < 2, "within seconds"
        put(recorder, 2, age=60)
        put(recorder, 3)
        stored(recorder, 2)
        assert numbers(tmp_path) == [1, 3]
        assert recorder.report().oldest == pytest.approx(time.time() - 10, abs=5)
    with live(tmp_path, changed(delete_before=time.time() - 5)) as recorder:
        until(lambda: numbers(tmp_path) == [3])
        (copy,) = (path.with_suffix(".rewrite") for path in tmp_path.glob("*.segment"))
        copy.write_bytes(b"text that a killed deletion left")
        recorder.apply(changed(delete_before=time.time() + 5))
        until(lambda: not list(tmp_path.glob("*.segment")))
        until(lambda: not copy.exists())


def test_a_queued_record_is_deleted_too(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, HANGING) as recorder:
        put(recorder, 0, 1, age=100)
        until(lambda: len(recorder._queue) == 1)
        recorder.apply(changed(redact=HANGING.redact, delete_before=time.time() - 50))
        until(lambda: not len(recorder._queue))
        held.set()
        put(recorder, 2)
        stored(recorder, 1)
        assert numbers(tmp_path) == [2]
        assert recorder.report().dropped == {"deleted": 2}


def test_age_is_enforced_without_traffic(tmp_path: Path) -> None:
    now = [1e9]
    with live(tmp_path, changed(max_age_seconds=1000.0), clock=lambda: now[0]) as recorder:
        recorder.enqueue(record(0, time_seconds=1e9), recorder.epoch)
        stored(recorder, 1)
        now[0] += 1001
        recorder._swept_at = 0.0  # the next sweep is due in a minute
        stored(recorder, 0)
        assert not list(tmp_path.glob("*.segment"))


def test_smaller_bounds_hold_at_once(tmp_path: Path) -> None:
    with live(tmp_path) as recorder:
        put(recorder, *range(20), tokens=5000)
        stored(recorder, 20)
        assert recorder.report().stored_bytes > 2**17
        recorder.apply(changed(max_bytes=2**16))
        until(lambda: recorder.report().stored_bytes <= 2**16)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.segment")) <= 2**16


def test_report_agrees_with_the_folder_and_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, age=30, task="qa")
        put(recorder, 1)
        stored(recorder, 2)
        size = sum(path.stat().st_size for path in tmp_path.glob("*.segment"))
        with monkeypatch.context() as broken:
            broken.setattr("pathlib.Path.glob", lambda *_: pytest.fail("a report scans the folder"))
            broken.setattr("pathlib.Path.open", lambda *_: pytest.fail("a report reads a segment"))
            report = recorder.report()
        assert (report.conversations, report.problem, report.dropped) == (2, None, {})
        assert report.stored_bytes == size
        assert report.oldest == pytest.approx(time.time() - 30, abs=5)
        assert recorder.counts.stored_bytes == report.stored_bytes
        assert recorder.counts.records == {"qa": 1, "other": 1}


def test_records_of_a_user_are_deleted_also_from_the_queue(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, HANGING) as recorder:
        ann, bob = recorder.subject_of("ann"), recorder.subject_of("bob")
        held.set()
        put(recorder, 0, user=ann)
        put(recorder, 1, user=bob)
        stored(recorder, 2)
        held.clear()
        put(recorder, 2, 3, user=ann)  # one is in the hook, the other waits
        put(recorder, 4, user=bob)
        until(lambda: len(recorder._queue) == 2)
        counts = recorder.delete_user("ann")
        assert (counts.records, counts.queued, counts.undecidable) == (1, 2, 0)
        held.set()
        stored(recorder, 2)
        put(recorder, 5, user=ann)
        stored(recorder, 3)
    assert numbers(tmp_path) == [1, 4, 5]


def test_rotated_token_prevents_no_deletion(tmp_path: Path) -> None:
    tokens = ["first"]
    with live(tmp_path, read_token=lambda: tokens[0]) as recorder:
        put(recorder, 0, user=recorder.subject_of("ann"))
        stored(recorder, 1)
        tokens[0] = "second"
        recorder._swept_at = 0.0
        first = recorder.subject_of("ann")
        until(lambda: recorder.subject_of("ann") != first)
        put(recorder, 1, user=recorder.subject_of("ann"))
        stored(recorder, 2)
    with live(tmp_path, read_token=lambda: "third") as recorder:
        stored(recorder, 2)
        assert recorder.delete_user("ann").records == 2
        assert numbers(tmp_path) == []
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob(f"*{KEY_SUFFIX}"))


def test_deletion_of_a_user_reads_the_keys_of_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, user=recorder.subject_of("ann"))
    (key,) = tmp_path.glob(f"*{KEY_SUFFIX}")
    reads: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *words: (reads.append(self), read_text(self, *words))[1])
    assert recorder.delete_user("ann").records == 1
    assert reads.count(key) == 1


def test_time_in_the_future_is_reported(tmp_path: Path) -> None:
    with live(tmp_path, changed(delete_before=time.time() + 3600)) as recorder:
        put(recorder, 0)
        report = recorder.report()
        assert "ahead of this worker's clock" in (report.problem or "")
        assert report.dropped == {"deleted": 1}


def test_undecodable_records_are_deleted_with_the_segment_that_is_rewritten(tmp_path: Path) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, user="a")
        put(recorder, 1)
        stored(recorder, 2)
        recorder._store._writer.append(msgspec.msgpack.encode({"tokens": 1}))  # type: ignore[union-attr]
        recorder.delete_user("nobody")
        assert numbers(tmp_path) == [0, 1]


def problem_of(recorder: Recorder) -> str:
    return recorder.report().problem or ""


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Yield a list; while its entry is true, no record can be written."""
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
        until(lambda: "No space left" in problem_of(recorder))
        until(lambda: recorder.counts.dropped[Dropped.write_error] == 1)
        full_disk[0] = False
        until(lambda: recorder.should_capture("other"))
        put(recorder, 1)
        stored(recorder, 1)
        assert problem_of(recorder) == ""
    assert numbers(tmp_path) == [1]


def test_changed_rules_are_tried_at_once(tmp_path: Path, full_disk: list[bool]) -> None:
    patient = type(LIMITS)(retry=3600, hang=0.3, tick=0.02)
    with live(tmp_path, limits=patient) as recorder:
        put(recorder, 0)
        until(lambda: problem_of(recorder))
        assert not recorder.should_capture("other")
        put(recorder, 1)
        assert recorder.counts.dropped[Dropped.stopped] == 2
        full_disk[0] = False
        recorder.apply(changed(share=0.999))
        until(lambda: not recorder.is_stopped)
        put(recorder, 2)
        stored(recorder, 1)
    assert numbers(tmp_path) == [2]


def test_slow_disk_delays_no_call(tmp_path: Path, slow_disk: threading.Event) -> None:
    with live(tmp_path) as recorder:
        began = time.monotonic()
        put(recorder, *range(QUEUE_RECORDS + 50))
        recorder.report()
        recorder.apply(changed(share=0.5))
        assert time.monotonic() - began < 2
        assert recorder.counts.dropped[Dropped.queue_full] >= 49
        until(lambda: "has not answered" in problem_of(recorder))
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
        until(lambda: not list(tmp_path.iterdir()))
        time.sleep(0.1)
        assert not list(tmp_path.iterdir()), "nothing is written afterwards"


def test_hanging_redaction_stops_capture_and_writes_nothing_later(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, HANGING) as recorder:
        put(recorder, 0, 1)
        until(lambda: "has not returned" in problem_of(recorder))
        assert recorder.report().dropped == {"stopped": 2}
        time.sleep(3 * LIMITS.retry)
        assert len([one for one in threading.enumerate() if one.name == "capture"]) == 1, "one hangs, no other starts"
        recorder.apply(RULES)
        until(lambda: recorder.should_capture("other"))
        put(recorder, 2)
        stored(recorder, 1)
        held.set()
        time.sleep(0.1)
        assert numbers(tmp_path) == [2]


def test_hook_that_returns_is_used_again(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, HANGING) as recorder:
        put(recorder, 0)
        until(lambda: problem_of(recorder))
        held.set()
        until(lambda: not problem_of(recorder))
        put(recorder, 1)
        stored(recorder, 1)
    assert numbers(tmp_path) == [1]


def test_capture_can_be_switched_off_while_redaction_hangs(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, RULES) as recorder:
        put(recorder, 0)
        stored(recorder, 1)
        recorder.apply(HANGING)
        put(recorder, 1)
        until(lambda: len(recorder._queue) == 0)
        recorder.apply(None)
        until(lambda: not list(tmp_path.iterdir()))
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
    try:
        with live(tmp_path / "captures", changed(redact="late_hooks:hook")) as recorder:
            until(lambda: "late_hooks:hook cannot be imported" in problem_of(recorder))
            put(recorder, 0)
            module.write_text("def hook(record):\n    return record\n")
            until(lambda: not problem_of(recorder))
            put(recorder, 1)
            stored(recorder, 1)
            assert numbers(tmp_path / "captures") == [1], "nothing is written without the hook"
    finally:
        sys.path.remove(str(tmp_path))


def test_thread_that_ends_is_replaced_and_its_message_is_not_reported(tmp_path: Path) -> None:
    with live(tmp_path, changed(redact=f"{HOOKS}:ending")) as recorder:
        put(recorder, 0)
        until(lambda: problem_of(recorder) == "the capture thread ended with SystemExit")
        assert recorder.counts.dropped[Dropped.redaction_error] == 1
        recorder.apply(RULES)
        until(lambda: recorder.should_capture("other"))
        put(recorder, 1)
        stored(recorder, 1)


def test_folder_that_cannot_be_written_is_reported_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.write_text("a file")
    with live(folder) as recorder:
        until(lambda: "cannot be written" in problem_of(recorder))
        assert not recorder.should_capture("other")
        folder.unlink()
        until(lambda: not problem_of(recorder))
        put(recorder, 0)
        stored(recorder, 1)


def test_folder_that_is_emptied_by_hand_gets_its_bounds_and_keys_again(tmp_path: Path) -> None:
    """Without them, text would outlive its age, and could not be deleted by user, once the worker is gone."""
    folder = tmp_path / "captures"
    with live(folder, read_token=lambda: "token") as recorder:
        put(recorder, 0, user=recorder.subject_of("ann"))
        stored(recorder, 1)
        shutil.rmtree(folder)
        put(recorder, 1, user=recorder.subject_of("ann"))
        until(lambda: folder.exists() and numbers(folder) == [1])
        assert stored_retention(folder) is not None
        assert set(stored_keys(folder)) == {key_id(derived_key("token"))}


def test_segment_that_cannot_be_rewritten_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, age=100)
        put(recorder, 1)
        stored(recorder, 2)
        monkeypatch.setattr(os, "fchmod", Mock(side_effect=OSError(28, "No space left on device")))
        recorder.apply(CaptureRules(share=1.0, delete_before=time.time() - 50))
        stored(recorder, 0)
        put(recorder, 2)
        stored(recorder, 1)
    assert numbers(tmp_path) == [2]


@pytest.mark.parametrize("step", ["open", "sweep", "delete_forbidden"])
def test_capture_goes_on_after_a_failure_of_the_control_thread(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0)
        stored(recorder, 1)
        with monkeypatch.context() as broken:
            broken.setattr(recorder._store, step, Mock(side_effect=OSError(5, "Input/output error")))
            recorder._swept_at = 0.0
            recorder.apply(changed(share=0.999, max_bytes=2**20))
            until(lambda: "Input/output error" in problem_of(recorder))
            assert recorder.is_stopped
        until(lambda: not problem_of(recorder) and not recorder.is_stopped)
        put(recorder, 1)
        stored(recorder, 2)
    assert numbers(tmp_path) == [0, 1]
