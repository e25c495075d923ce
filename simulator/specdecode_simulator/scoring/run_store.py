"""Runs that ended, on disk: a file a trace, length and seed, a line a policy, so that a stopped simulation goes on."""

from __future__ import annotations

import json
from pathlib import Path

from specdecode_simulator.errors import SimulatorError
from specdecode_simulator.scoring.run import Run, as_json, of_json
from specdecode_simulator.world.fleet import POLL_SECONDS


def file_of(folder: Path, trace: str, hours: float, seed: int, poll_seconds: float = POLL_SECONDS) -> Path:
    """Return the file of one trace and seed; the poll interval is in its name where it is not the default."""
    poll = "" if poll_seconds == POLL_SECONDS else f"-poll{poll_seconds:g}s"
    return folder / f"{trace}-{hours:g}h{poll}-{seed}.jsonl"


def read_runs(file: Path) -> dict[str, Run]:
    """By policy. A last line that was cut off is dropped. Raises SimulatorError."""
    if not file.exists():
        return {}
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    try:
        return {document["policy"]: of_json(document) for document in map(json.loads, whole.splitlines())}
    except (KeyError, TypeError, ValueError) as error:
        raise SimulatorError(f"{file} holds no runs of this version; remove it: {error}") from error


def append_run(file: Path, policy: str, run: Run) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps({"policy": policy, **as_json(run)}) + "\n")
