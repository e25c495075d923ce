"""Command line of the operator: what it hands over to the simulator, and what it says without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specdecode_operator import __main__ as command


def test_simulate_hands_its_flags_to_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/flags\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(command, "simulator_command", lambda: [str(program)])
    assert command.main(["simulate", "--trace", "ramp", "--json", "--help"]) == 3
    assert (tmp_path / "flags").read_text() == "--trace ramp --json --help\n"


def test_simulate_without_the_simulator_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "specdecode_simulator", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["simulate", "--list"]) == 1
    assert "pip install . ./simulator" in capsys.readouterr().err


def test_a_simulator_on_the_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "specdecode-simulate"
    program.write_text(f"#!/bin/sh\necho run > {tmp_path}/flags\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "specdecode_simulator", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert command.main(["simulate"]) == 0
    assert (tmp_path / "flags").read_text() == "run\n"


@pytest.mark.slow
def test_the_operator_starts_without_simulator_and_plots() -> None:
    code = """
import sys, specdecode_operator.__main__
sys.exit(bool({"matplotlib", "specdecode_simulator"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
