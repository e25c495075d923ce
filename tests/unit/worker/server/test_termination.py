"""Tests of the termination message of a pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker import termination
from specdecode_worker.termination import ENV_PATH, MAX_BYTES, write_termination_message


def test_message_is_truncated_and_written_to_the_configured_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_PATH, str(tmp_path / "log"))
    write_termination_message("é" * MAX_BYTES)
    assert (tmp_path / "log").read_text() == "é" * (MAX_BYTES // 2)
    (tmp_path / "log").write_text("")
    write_termination_message("x" + "é" * MAX_BYTES)
    assert (tmp_path / "log").read_text() == "x" + "é" * (MAX_BYTES // 2 - 1), "half a character is none"


def test_first_termination_message_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_PATH, str(tmp_path / "log"))
    write_termination_message("no memory")
    write_termination_message("the engine is gone")
    assert (tmp_path / "log").read_text() == "no memory"


def test_no_message_is_written_outside_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_PATH, raising=False)
    monkeypatch.setattr(termination, "DEFAULT_PATH", str(tmp_path / "absent"))
    write_termination_message("lost")
    assert not (tmp_path / "absent").exists()
    (tmp_path / "absent").touch()
    write_termination_message("kept")
    assert (tmp_path / "absent").read_text() == "kept"


def test_unwritable_message_path_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_PATH, str(tmp_path))
    write_termination_message("nowhere to go")
