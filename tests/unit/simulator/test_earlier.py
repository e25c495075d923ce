"""`--against`: the operator compared with the runs that an earlier version kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdecode_simulator.command import main

FLAGS = ["--trace", "acceptance-step", "--hours", "0.05", "--seeds", "2", "--policy", "ours"]


@pytest.fixture
def earlier(recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Runs of a version that took 10 % more time per token and changed the plan once an hour."""
    folder = tmp_path / "earlier"
    assert main([*FLAGS, "--keep", str(folder), "--recordings", str(recordings)]) == 0
    capsys.readouterr()
    for file in folder.iterdir():
        runs = [json.loads(line) for line in file.read_text().splitlines()]
        for run in runs:
            if run["policy"] == "ours":
                run["figures"]["time_per_token"] *= 1.1
                run["figures"]["plan_changes_per_hour"] = 1.0
        file.write_text("".join(json.dumps(run) + "\n" for run in runs))
    return folder


def test_differences_are_paired_by_seed(recordings: Path, earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--against", str(earlier), "--json", "--recordings", str(recordings)]) == 0
    document = json.loads(capsys.readouterr().out)
    figures = document["against"]["traces"]["acceptance-step"]
    ratio = document["traces"]["acceptance-step"]["policies"]["ours"]["time_per_token"]["mean"]
    assert figures["seeds"] == 2
    assert figures["ours"]["mean"] == ratio
    assert figures["difference"]["mean"] == pytest.approx(-0.1 * ratio, abs=1e-4)
    assert figures["plan_changes_per_hour"][1] == 1.0
    assert document["against"]["mean"]["difference"] == figures["difference"]["mean"]


def test_seeds_without_earlier_runs_are_left_out(
    recordings: Path, earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (earlier / "acceptance-step-0.05h-1.jsonl").unlink()
    assert main([*FLAGS, "--against", str(earlier), "--recordings", str(recordings)]) == 0
    text = capsys.readouterr().out
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  acceptance-step  1 ")]
    assert float(row[4]) < -0.05
    assert "against 1.0" in " ".join(row)


def test_a_folder_without_these_runs_is_refused(
    recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLAGS, "--hours", "0.01", "--against", str(tmp_path / "none"), "--recordings", str(recordings)]) == 1
    assert "--against: " in capsys.readouterr().err
