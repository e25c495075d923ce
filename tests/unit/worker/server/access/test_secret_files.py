"""Secrets in folders and files: what is read, what is ignored and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker.http_edge import UnusableFiles
from specdecode_worker.server.admission import read_fingerprint, read_secrets


def test_folder_holds_one_key_per_file_and_dot_files_are_ignored(tmp_path: Path) -> None:
    data = tmp_path / "..2026"
    data.mkdir()
    (data / "alice").write_text("key-a\n")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "alice").symlink_to("..data/alice")
    (tmp_path / "bob.dev").write_text("key-b")
    (tmp_path / ".hidden").write_text("key-h")
    (tmp_path / "removed").symlink_to("..data/removed")
    (tmp_path / "folder").mkdir()
    assert read_secrets(tmp_path) == {"alice": "key-a", "bob.dev": "key-b"}


def test_settings_of_tenants_are_no_key_and_a_file_may_hold_two(tmp_path: Path) -> None:
    """Workers and routers mount the same Secret."""
    (tmp_path / "tenants.json").write_text('{"alice": {"weight": 2}}')
    (tmp_path / "alice").write_text("new-key\nold-key\n")
    assert read_secrets(tmp_path) == {"alice": "new-key", "alice/2": "old-key"}
    before = read_fingerprint(tmp_path)
    (tmp_path / "tenants.json").write_text("{}")
    assert read_fingerprint(tmp_path) == before


def test_file_holds_one_key_per_line_with_or_without_a_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice=key-a\n\nplain\n  bob = key=b== \nc2VjcmV0==\nlast=\n")
    expected = {"alice": "key-a", "key-3": "plain", "bob": "key=b==", "key-4": "c2VjcmV0==", "key-5": "last="}
    assert read_secrets(file, first_number=3) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no key"),
        (" \n\n", "holds no key"),
        ("a=1x\na=2x", "line 2: the name a occurs twice"),
        ("two words", "line 1: a key is one word"),
        ("schlüssel", "line 1: a key is one word"),
        ("x" * (1 << 20 | 1), "has more than"),
        ("\n".join(f"k{i}" for i in range(5000)), "holds 5000 keys"),
    ],
)
def test_unusable_file_is_refused_without_its_content(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UnusableFiles, match=problem) as refused:
        read_secrets(file)
    assert "two words" not in str(refused.value)


@pytest.mark.parametrize(("name", "text"), [("alice", ""), ("alice", "a b"), ("al ice", "key"), ("alice~", "key")])
def test_unusable_file_of_a_folder_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "good").write_text("key")
    (tmp_path / name).write_text(text)
    with pytest.raises(UnusableFiles, match=name):
        read_secrets(tmp_path)


def test_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    for read in (read_secrets, read_fingerprint):
        with pytest.raises(UnusableFiles, match="No such file"):
            read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UnusableFiles, match="UTF-8"):
        read_secrets(tmp_path / "binary")
    with pytest.raises(UnusableFiles, match="holds no key"):
        read_secrets(tmp_path.joinpath("empty").mkdir() or tmp_path / "empty")


def test_fingerprint_changes_with_content_and_names(tmp_path: Path) -> None:
    seen = {read_fingerprint(tmp_path)}
    (tmp_path / "a").write_text("1")
    seen.add(read_fingerprint(tmp_path))
    (tmp_path / "next").write_text("2")
    (tmp_path / "next").replace(tmp_path / "a")
    seen.add(read_fingerprint(tmp_path))
    assert len(seen) == 3
    assert read_fingerprint(tmp_path) in seen
