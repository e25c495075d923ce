"""Tests of segments: a crash loses at most the last record, and the bounds hold across writers."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_worker.capture.records import FolderUnusable, Record, decode, encode
from specdecode_worker.capture.segments import SUFFIX, ReadStats, Retention, SegmentWriter, list_segments, read_records
from support.worker.captured import record


def writer(folder: Path, *, max_bytes: int = 2**20, max_age_seconds: float = 1e9, now: float = 0.0) -> SegmentWriter:
    return SegmentWriter(folder, Retention(max_age_seconds, max_bytes), clock=lambda: now)


def read(folder: Path, now: float = 0.0) -> tuple[list[Record], ReadStats]:
    stats = ReadStats()
    return list(read_records([folder], stats, clock=lambda: now)), stats


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"*{SUFFIX}"))


def test_records_round_trip(tmp_path: Path) -> None:
    records = [record(i) for i in range(5)]
    segments = writer(tmp_path)
    for one in records:
        segments.append(encode(one))
    stored_records, stats = read(tmp_path)
    assert stored_records == records
    assert (stats.segments, stats.torn, stats.unreadable) == (1, 0, 0)


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


def test_writer_continues_after_its_segment_was_deleted(tmp_path: Path) -> None:
    segments = writer(tmp_path)
    segments.append(encode(record(0)))
    for path in tmp_path.glob(f"*{SUFFIX}"):
        path.unlink()
    segments.append(encode(record(1)))
    assert read(tmp_path)[0] == [record(1)]


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
        broken.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
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
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", refuse)
        segments = writer(tmp_path / "new")
        with pytest.raises(OSError, match="No space"):
            segments.append(encode(record(0)))
    segments.append(encode(record(1)))
    assert read(tmp_path / "new")[0] == [record(1)]


def test_a_failed_sweep_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = writer(tmp_path)
    monkeypatch.setattr(segments, "sweep", lambda: (_ for _ in ()).throw(PermissionError(13, "no")))
    segments.append(encode(record(0)))
    assert read(tmp_path)[0] == [record(0)]


def test_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderUnusable, match="file"):
        writer(tmp_path / "file")
    with pytest.raises(FolderUnusable, match="--capture"):
        list(read_records([tmp_path / "missing"], ReadStats()))
