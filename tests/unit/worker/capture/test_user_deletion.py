"""Deletion of one user's records, also while a worker writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.capture import ReadStats, Record, read_records
from specdecode_worker.capture.records import encode
from specdecode_worker.capture.segments import (
    KEY_SUFFIX,
    Retention,
    SegmentWriter,
    SubjectKeys,
    UserHashes,
    delete_user_records,
    derived_key,
    key_id,
    keyed_hash,
    list_segments,
    stored_keys,
)
from support.worker.captured import record

KEY = derived_key("token")


def keyed(number: int, user: str, key: bytes) -> Record:
    return msgspec.structs.replace(record(number), user=keyed_hash(key, user))


def of_user(number: int, user: str) -> Record:
    return keyed(number, user, KEY) if user else record(number)


def writer(folder: Path) -> SegmentWriter:
    """Return a writer to a folder that holds the key of `of_user`."""
    folder.mkdir(parents=True, exist_ok=True)
    subjects = SubjectKeys(folder, lambda: "token")
    subjects.store_for(subjects.hash_of("ann"))
    return SegmentWriter(folder, Retention(1e9, 2**20))


def read(folder: Path) -> list[Record]:
    stats = ReadStats()
    records = list(read_records([folder], stats))
    assert (stats.torn, stats.unreadable) == (0, 0)
    return records


def test_records_of_the_user_are_deleted_and_the_writer_goes_on(tmp_path: Path) -> None:
    segments = writer(tmp_path)
    for number, user in enumerate(["ann", "bob", "", "ann"]):
        segments.append(encode(of_user(number, user)))
    (before,) = list_segments(tmp_path)
    counts = delete_user_records(tmp_path, "ann")
    assert (counts.records, counts.segments, counts.unreadable) == (2, 1, 0)
    (after,) = list_segments(tmp_path)
    assert (after.path, after.path.stat().st_mode) == (before.path, before.path.stat().st_mode), "its age stays"
    segments.append(encode(of_user(4, "bob")))
    assert read(tmp_path) == [of_user(1, "bob"), of_user(2, ""), of_user(4, "bob")]
    assert delete_user_records(tmp_path, "nobody").segments == 0


def test_a_segment_without_other_records_is_deleted(tmp_path: Path) -> None:
    writer(tmp_path).append(encode(of_user(0, "ann")))
    assert delete_user_records(tmp_path, "ann").records == 1
    assert list_segments(tmp_path) == []


def test_a_truncated_end_is_dropped(tmp_path: Path) -> None:
    segments = writer(tmp_path)
    for number in range(2):
        segments.append(encode(of_user(number, "bob")))
    (segment,) = list_segments(tmp_path)
    segment.path.write_bytes(segment.path.read_bytes()[:-3])
    counts = delete_user_records(tmp_path, "ann")
    assert (counts.records, counts.segments) == (0, 1)
    assert read(tmp_path) == [of_user(0, "bob")]


@pytest.mark.parametrize("attempt", range(3))
def test_no_other_record_is_lost_while_a_worker_writes(tmp_path: Path, attempt: int) -> None:
    segments, count = writer(tmp_path), 400
    thread = threading.Thread(
        target=lambda: [segments.append(encode(of_user(n, "ann" if n % 3 else "bob"))) for n in range(count)]
    )
    thread.start()
    while thread.is_alive():
        delete_user_records(tmp_path, "ann")
    delete_user_records(tmp_path, "ann")
    assert sorted(one.sampling.seed for one in read(tmp_path)) == list(range(0, count, 3))


def test_the_command_deletes_and_says_what_it_cannot_read(tmp_path: Path, capsys: Any) -> None:
    segments = writer(tmp_path)
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
    segments, other_subjects = writer(copy), SubjectKeys(other, lambda: "other")
    other.mkdir()
    other_subjects.store_for(other_subjects.hash_of("ann"))
    segments.append(encode(keyed(0, "ann", derived_key("old"))))
    segments.append(encode(keyed(1, "ann", derived_key("other"))))
    assert main(["capture", "delete", "--user", "ann", str(copy)]) == 1
    assert "2 records have hashes of an unknown key" in capsys.readouterr().err
    assert main(["capture", "delete", "--user", "ann", str(copy), str(other)]) == 1, "the keys of all named folders"
    assert [one.sampling.seed for one in read(copy)] == [0]
    tokens = tmp_path / "operator"
    tokens.write_text("new\nold\n")
    assert main(["capture", "delete", "--user", "ann", "--token-file", str(tokens), str(copy)]) == 0
    assert read(copy) == []
    assert main(["capture", "delete", "--user", "ann", "--token-file", str(copy / "none"), str(copy)]) == 1


def test_hashes_cannot_be_computed_without_the_key() -> None:
    hashes = UserHashes("ann", [derived_key("mine")])
    assert hashes.matches(keyed_hash(derived_key("mine"), "ann"))
    assert not hashes.matches(keyed_hash(derived_key("theirs"), "ann"))
    assert hashes.is_undecidable(keyed_hash(derived_key("theirs"), "ann"))
    assert not hashes.is_undecidable(keyed_hash(derived_key("mine"), "bob"))
    assert not hashes.is_undecidable("")


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
