"""Capture that follows the plan's rules: on, off, other rules, deletions and reports."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from specdecode_worker.capture import Dropped
from specdecode_worker.capture.segments import KEY_SUFFIX
from specdecode_worker.contract.capture import CaptureReport, CaptureRules
from support.worker.captured import record
from support.worker.live_captures import RULES, live, numbers, put, stored, wait


def changed(**values: object) -> CaptureRules:
    return RULES.model_copy(update=values)


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
        wait(lambda: not list(folder.iterdir()))
        wait(lambda: recorder.report() == CaptureReport(dropped={"deleted": 2}))  # counted after the last file is gone
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
        wait(lambda: not list(tmp_path.iterdir()))


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
            wait(lambda: recorder._control._writer.activity() is not None)  # type: ignore[union-attr]
            recorder.apply(changed(redact="support.worker.redaction_hooks:odd_ones"))
        wait(lambda: recorder.counts.dropped == {Dropped.redacted: 1})
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
        wait(lambda: numbers(tmp_path) == [3])


def test_a_queued_record_is_deleted_too(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, changed(redact="support.worker.redaction_hooks:hanging")) as recorder:
        put(recorder, 0, 1, age=100)
        wait(lambda: len(recorder._queue) == 1)
        recorder.apply(changed(redact="support.worker.redaction_hooks:hanging", delete_before=time.time() - 50))
        wait(lambda: not len(recorder._queue))
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
        recorder._control._swept_at = 0.0  # the next sweep is due in a minute
        stored(recorder, 0)
        assert not list(tmp_path.glob("*.segment"))


def test_smaller_bounds_hold_at_once(tmp_path: Path) -> None:
    with live(tmp_path) as recorder:
        put(recorder, *range(20), tokens=5000)
        stored(recorder, 20)
        assert recorder.report().stored_bytes > 2**17
        recorder.apply(changed(max_bytes=2**16))
        wait(lambda: recorder.report().stored_bytes <= 2**16)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.segment")) <= 2**16


def test_report_agrees_with_the_folder_and_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(tmp_path) as recorder:
        put(recorder, 0, age=30)
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
        assert recorder.counts.records == {"other": 2}


def test_records_of_a_user_are_deleted_also_from_the_queue(tmp_path: Path, held: threading.Event) -> None:
    with live(tmp_path, changed(redact="support.worker.redaction_hooks:hanging")) as recorder:
        ann, bob = recorder.subject_of("ann"), recorder.subject_of("bob")
        held.set()
        put(recorder, 0, user=ann)
        put(recorder, 1, user=bob)
        stored(recorder, 2)
        held.clear()
        put(recorder, 2, 3, user=ann)  # one is in the hook, the other waits
        put(recorder, 4, user=bob)
        wait(lambda: len(recorder._queue) == 2)
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
        recorder._control._swept_at = 0.0
        first = recorder.subject_of("ann")
        wait(lambda: recorder.subject_of("ann") != first)
        put(recorder, 1, user=recorder.subject_of("ann"))
        stored(recorder, 2)
    with live(tmp_path, read_token=lambda: "third") as recorder:
        stored(recorder, 2)
        assert recorder.delete_user("ann").records == 2
        assert numbers(tmp_path) == []
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob(f"*{KEY_SUFFIX}"))


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
