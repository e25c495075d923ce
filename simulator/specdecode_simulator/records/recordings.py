"""Recorded step times and ranks of a checkout: where they are, and what is read of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdecode_simulator.errors import SimulatorError
from specdecode_simulator.records.acceptance_walks import Records
from specdecode_simulator.records.step_times import StepTable, published, recorded

FILES = ("ranks-smollm2.json", "steps-smollm2-cpu.json", "steps-composed.json", "confidence-smollm2.json")
TUNED = "tuned-baselines.json"
QUIET_STEPS = 200
"""The first steps of the recorded series, before a neighbour woke up; the whole is a world of its own."""


@dataclass(frozen=True, slots=True)
class Library:
    """Acceptance records and step tables that all runs share."""

    records: Records
    tables: Mapping[str, StepTable]


def nearest() -> Path:
    """Return the recordings of the working directory, or of the checkout that this runs from.

    Raises:
        SimulatorError: There are none.
    """
    for base in (Path.cwd(), *Path(__file__).resolve().parents):
        folder = base / "benchmarks" / "recordings"
        if (folder / FILES[0]).exists():
            return folder
    raise SimulatorError("no recordings here; name a checkout's benchmarks/recordings with --recordings")


@lru_cache
def library(folder: Path) -> Library:
    """Read the step tables and rank records of a folder.

    Raises:
        SimulatorError: A file is missing or wrong.
    """
    try:
        ranks, steps, figures, confidence = (json.loads((folder / name).read_text()) for name in FILES)
        quiet = {**steps, "series": steps["series"][:QUIET_STEPS]}
        tables = {"smollm2-cpu": recorded(quiet), "smollm2-cpu-busy": recorded(steps), **published(figures)}
        return Library(Records.of(ranks, confidence["bins"]), tables)
    except (OSError, KeyError, ValueError) as error:
        raise SimulatorError(f"{folder} has no usable recordings: {error}; see benchmarks/recordings") from error


def tuned(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the tuned parameters of the other rules (``--tune``); empty if there are none."""
    path = folder / TUNED
    policies: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text())["policies"] if path.exists() else {}
    return policies
