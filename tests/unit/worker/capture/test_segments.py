"""Segments: a crash loses at most the last record, bounds hold across writers, deletion by age and by user."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_worker.__main__ import main
from specdecode_worker.capture import ReadStats, Record, read_records
from specdecode_worker.capture.records import FolderUnusable, decode, encode
from specdecode_worker.capture.segments import (
    KEY_SUFFIX,
    SUFFIX,
    Retention,
    SegmentWriter,
    SubjectKeys,
    delete_user_records,
    derived_key,
    key_id,
    keyed_hash,
    list_segments,
    stored_keys,
    stored_retention,
)
from support.worker.captures import record


def writer(folder: Path, *, max_bytes: int = 2**20, max_age_seconds: float = 1e9, now: float = 0.0) -> SegmentWriter:
    return SegmentWriter(folder, Retention(max_age_seconds, max_bytes), clock=lambda: now)


def read(folder: Path, now: float = 0.0) -> tuple[list[Record], ReadStats]:
    stats = ReadStats()
    return list(read_records([folder], stats, clock=lambda: now)), stats


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))


@given(cut=st.sampled_from((0, 1, 7, 200)), flip=st.integers(0, 5000))
@settings(max_examples=100, deadline=None)
def test_records_before_a_torn_or_damaged_tail_are_read(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    segments = writer(folder)
    ends = []
    for i in range(4):
        segments.append(encode(record(i)))
        ends.append(stored(folder))
    (path,) = folder.glob(f"*{SUFFIX}")
    content = bytearray(path.read_bytes())
    del content[len(content) - min(cut, len(content)) :]
    whole = [end for end in ends if end <= len(content)]
    if len(content) > 8 and flip % 2:
        at = 8 + flip % (len(content) - 8)
        content[at] ^= 1 << flip % 8
        whole = [end for end in ends if end <= at]
    path.write_bytes(content)
    records, _ = read(folder)
    assert records == [record(i) for i in range(len(whole))]


def test_a_torn_tail_is_counted_and_the_next_segment_read(tmp_path: Path) -> None:
    for number in range(2):
        segments = writer(tmp_path, now=float(number))
        segments.append(encode(record(number)))
        segments.close()
    first = min(tmp_path.glob(f"*{SUFFIX}"))
    first.write_bytes(first.read_bytes()[:-3])
    (tmp_path / f"{0:018}-x{SUFFIX}").write_bytes(b"not ours")
    records, stats = read(tmp_path)
    assert records == [record(1)]
    assert (stats.segments, stats.torn) == (3, 2)


def test_a_frame_without_a_record_is_counted_and_skipped(tmp_path: Path) -> None:
    segments = writer(tmp_path)
    for body in (encode(record(0)), msgspec.msgpack.encode({"tokens": "none"}), encode(record(1))):
        segments.append(body)
    records, stats = read(tmp_path)
    assert (records, stats.unreadable) == ([record(0), record(1)], 1)


def test_a_record_holds_no_grammar() -> None:
    document = msgspec.to_builtins(record(0))
    document["sampling"]["grammar"] = "choice: Ann Smith"
    with pytest.raises(msgspec.ValidationError, match="grammar"):
        decode(msgspec.msgpack.encode(document))


def test_fields_of_a_newer_writer_are_ignored(tmp_path: Path) -> None:
    segments = writer(tmp_path)
    segments.append(msgspec.msgpack.encode({**msgspec.to_builtins(record(0)), "later": 1}))
    assert read(tmp_path)[0] == [record(0)]


def test_bytes_are_bounded_for_all_writers_together(tmp_path: Path) -> None:
    rng, most = random.Random(0), 2**16
    i = 0
    writers = [SegmentWriter(tmp_path, Retention(1e9, most), clock=lambda: float(i)) for _ in range(5)]
    for i in range(3000):
        rng.choice(writers).append(encode(record(i, tokens=rng.randint(10, 60))))
        assert stored(tmp_path) <= most
    records, stats = read(tmp_path)
    assert stats.torn == 0
    assert stored(tmp_path) > most // 3, "not emptied either"
    assert max(one.sampling.seed for one in records) == 2999, "the newest is there"


def test_records_are_deleted_after_their_maximum_age(tmp_path: Path) -> None:
    now = 0.0
    segments = SegmentWriter(tmp_path, Retention(160, 2**20), clock=lambda: now)
    for second in range(600):
        now = float(second)
        segments.append(encode(record(second, time_seconds=now)))
        if second % 10 == 0:
            segments.sweep()
        assert all(one.time_seconds >= now - 160 for one in read(tmp_path)[0])
    assert min(one.time_seconds for one in read(tmp_path)[0]) < now - 100, "and is not lost long before"
    now = 10_000.0
    segments.sweep()
    assert list_segments(tmp_path) == []


class Disk:
    """Replacement of os.write with a limited number of bytes left, as on a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, space: int) -> None:
        self.space = space
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, content: bytes) -> int:
        if not self.space:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(file, content[: self.space])
        self.space -= written
        return written


@pytest.mark.parametrize("space", range(0, 400, 7))
def test_a_full_disk_leaves_only_whole_frames(space: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = writer(tmp_path)
    disk = Disk(monkeypatch, space)
    appended = []
    for number in range(8):
        if number == 5:
            disk.space = 10_000
        with contextlib.suppress(OSError):
            segments.append(encode(record(number)))
            appended.append(record(number))
        records, stats = read(tmp_path)
        assert (records, stats.torn, stats.unreadable) == (appended, 0, 0)
    assert appended[-3:] == [record(number) for number in (5, 6, 7)], "it recovers"


def test_a_segment_that_cannot_be_cut_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = writer(tmp_path)
    segments.append(encode(record(0)))
    disk = Disk(monkeypatch, 20)
    with monkeypatch.context() as broken:
        broken.setattr(os, "ftruncate", Mock(side_effect=OSError(errno.EIO, "no")))
        with pytest.raises(OSError, match="only 20 of"):
            segments.append(encode(record(1)))
    disk.space = 10_000
    segments.append(encode(record(2)))
    records, stats = read(tmp_path)
    # Segments that begin within one clock tick are read in the order of their random names.
    in_order = sorted(records, key=lambda one: one.tokens[0])
    assert (in_order, stats.segments, stats.torn) == ([record(0), record(2)], 2, 1)


def test_a_file_system_may_refuse_at_the_close_of_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems report failed writes at close. The descriptor is free even so, and must not be kept."""
    close = os.close

    def refuse(file: int) -> None:
        close(file)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    segments = writer(tmp_path)
    segments.append(encode(record(0)))
    with monkeypatch.context() as refusing:
        refusing.setattr(os, "close", refuse)
        segments.close()
    assert segments.open_path is None
    segments.append(encode(record(1)))
    assert sorted(one.tokens[0] for one in read(tmp_path)[0]) == [0, 1]


def test_a_disk_that_is_full_at_start_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        segments = writer(tmp_path / "new")
        with pytest.raises(OSError, match="No space"):
            segments.append(encode(record(0)))
    segments.append(encode(record(1)))
    assert read(tmp_path / "new")[0] == [record(1)]


def test_a_failed_sweep_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = writer(tmp_path)
    monkeypatch.setattr(segments, "sweep", Mock(side_effect=PermissionError(13, "no")))
    segments.append(encode(record(0)))
    assert read(tmp_path)[0] == [record(0)]


def test_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderUnusable, match="file"):
        writer(tmp_path / "file")
    with pytest.raises(FolderUnusable, match="--capture"):
        list(read_records([tmp_path / "missing"], ReadStats()))


AGE_SECONDS = 160.0


def write(folder: Path, seconds: list[float]) -> None:
    """Write one segment for each time, as a worker that no longer runs."""
    for number, began in enumerate(seconds):
        segments = SegmentWriter(folder, Retention(1e12, 2**20), clock=lambda began=began: began)
        segments.append(encode(record(number)))
        segments.close()
    SegmentWriter(folder, Retention(AGE_SECONDS, 2**20))


def numbers(folder: Path, now: float) -> list[int]:
    return [one.sampling.seed for one in read(folder, now)[0]]


def test_a_reader_deletes_what_has_expired(tmp_path: Path) -> None:
    write(tmp_path, [1000, 1100, 1200])
    assert stored_retention(tmp_path) == Retention(AGE_SECONDS, 2**20)
    assert numbers(tmp_path, now=1140) == [0, 1, 2]
    assert numbers(tmp_path, now=1161) == [1, 2]
    assert len(list_segments(tmp_path)) == 2


def test_a_reader_leaves_out_what_it_cannot_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [1000, 1200])
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(30, "read-only")))
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


KEY = derived_key("token")


def keyed(number: int, user: str, key: bytes) -> Record:
    return msgspec.structs.replace(record(number), user=keyed_hash(key, user))


def of_user(number: int, user: str) -> Record:
    return keyed(number, user, KEY) if user else record(number)


def writer_with_key(folder: Path) -> SegmentWriter:
    """Return a writer to a folder that holds the key of `of_user`."""
    folder.mkdir(parents=True, exist_ok=True)
    subjects = SubjectKeys(folder, lambda: "token")
    subjects.store_for(subjects.hash_of("ann"))
    return SegmentWriter(folder, Retention(1e9, 2**20))


def whole_records(folder: Path) -> list[Record]:
    records, stats = read(folder)
    assert (stats.torn, stats.unreadable) == (0, 0)
    return records


def test_records_of_the_user_are_deleted_and_the_writer_goes_on(tmp_path: Path) -> None:
    segments = writer_with_key(tmp_path)
    for number, user in enumerate(["ann", "bob", "", "ann"]):
        segments.append(encode(of_user(number, user)))
    (before,) = list_segments(tmp_path)
    counts = delete_user_records(tmp_path, "ann")
    assert (counts.records, counts.segments, counts.unreadable, counts.undecidable) == (2, 1, 0, 0)
    (after,) = list_segments(tmp_path)
    assert (after.path, after.path.stat().st_mode) == (before.path, before.path.stat().st_mode), "its age stays"
    segments.append(encode(of_user(4, "bob")))
    assert whole_records(tmp_path) == [of_user(1, "bob"), of_user(2, ""), of_user(4, "bob")]
    assert delete_user_records(tmp_path, "nobody").segments == 0


def test_a_segment_goes_whole_with_the_copy_that_a_killed_deletion_left(tmp_path: Path) -> None:
    writer_with_key(tmp_path).append(encode(of_user(0, "ann")))
    (segment,) = list_segments(tmp_path)
    copy = shutil.copy(segment.path, segment.path.with_suffix(".rewrite"))
    assert delete_user_records(tmp_path, "ann").records == 1
    assert list_segments(tmp_path) == []
    assert not copy.exists()


def test_a_truncated_end_is_dropped(tmp_path: Path) -> None:
    segments = writer_with_key(tmp_path)
    for number in range(2):
        segments.append(encode(of_user(number, "bob")))
    (segment,) = list_segments(tmp_path)
    segment.path.write_bytes(segment.path.read_bytes()[:-3])
    counts = delete_user_records(tmp_path, "ann")
    assert (counts.records, counts.segments) == (0, 1)
    assert whole_records(tmp_path) == [of_user(0, "bob")]


@pytest.mark.parametrize("attempt", range(3))
def test_no_other_record_is_lost_while_a_worker_writes(tmp_path: Path, attempt: int) -> None:
    segments, count = writer_with_key(tmp_path), 400
    thread = threading.Thread(
        target=lambda: [segments.append(encode(of_user(n, "ann" if n % 3 else "bob"))) for n in range(count)]
    )
    thread.start()
    while thread.is_alive():
        delete_user_records(tmp_path, "ann")
    delete_user_records(tmp_path, "ann")
    assert sorted(one.sampling.seed for one in whole_records(tmp_path)) == list(range(0, count, 3))


def test_the_command_deletes_and_says_what_it_cannot_read(tmp_path: Path, capsys: Any) -> None:
    segments = writer_with_key(tmp_path)
    segments.append(encode(of_user(0, "ann")))
    segments.append(encode(of_user(1, "bob")))
    assert main(["capture", "delete", "--user", "ann", str(tmp_path)]) == 0
    assert "1 records deleted, 1 segments rewritten" in capsys.readouterr().out
    segments.append(msgspec.msgpack.encode({"tokens": "none"}))
    assert main(["capture", "delete", "--user", "ann", str(tmp_path)]) == 1
    assert "1 segments or records cannot be read" in capsys.readouterr().err
    assert main(["capture", "delete", "--user", "ann", str(tmp_path / "missing")]) == 1


def test_copies_without_keys_need_the_tokens(tmp_path: Path, capsys: Any) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    segments, other_subjects = writer_with_key(copy), SubjectKeys(other, lambda: "other")
    other.mkdir()
    other_subjects.store_for(other_subjects.hash_of("ann"))
    segments.append(encode(keyed(0, "ann", derived_key("old"))))
    segments.append(encode(keyed(1, "ann", derived_key("other"))))
    assert main(["capture", "delete", "--user", "ann", str(copy)]) == 1
    assert "2 records have hashes of an unknown key" in capsys.readouterr().err
    assert main(["capture", "delete", "--user", "ann", str(copy), str(other)]) == 1, "the keys of all named folders"
    assert [one.sampling.seed for one in whole_records(copy)] == [0]
    tokens = tmp_path / "operator"
    tokens.write_text("new\nold\n")
    assert main(["capture", "delete", "--user", "ann", "--token-file", str(tokens), str(copy)]) == 0
    assert whole_records(copy) == []
    assert main(["capture", "delete", "--user", "ann", "--token-file", str(copy / "none"), str(copy)]) == 1


def test_keys_are_deleted_once_no_record_can_need_them(tmp_path: Path) -> None:
    for token in ("old", "recent", "current"):
        subjects = SubjectKeys(tmp_path, lambda token=token: token)  # type: ignore[misc]
        subjects.store_for(subjects.hash_of("ann"))
    path = tmp_path / f"{key_id(derived_key('old'))}{KEY_SUFFIX}"
    os.utime(path, (0, 0))
    current = tmp_path / f"{key_id(derived_key('current'))}{KEY_SUFFIX}"
    os.utime(current, (0, 0))
    subjects.expire(3600)
    assert set(stored_keys(tmp_path)) == {key_id(derived_key("recent")), key_id(derived_key("current"))}
