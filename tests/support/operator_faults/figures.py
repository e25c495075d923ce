"""The record of measured figures: out/operator-faults.json, by revision, row and name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from support.kube import ROOT, wait_for

FILE = ROOT / "out" / "operator-faults.json"


class Figures:
    """Figures of one revision. Each record is written at once, so that a failing test leaves its figure too."""

    def __init__(self, revision: str, file: Path = FILE) -> None:
        self._revision = revision
        self._file = file

    def record(self, row: int | str, name: str, value: float | int | str) -> None:
        """Write one figure; times are in seconds, with two decimals."""
        document = json.loads(self._file.read_text()) if self._file.exists() else {}
        row_figures = document.setdefault(self._revision, {}).setdefault(str(row), {})
        row_figures[name] = round(value, 2) if isinstance(value, float) else value
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        print(f"row {row}: {name} = {row_figures[name]}")

    def record_seconds(
        self, row: int | str, name: str, condition: Callable[[], object], *, limit_s: float, every_s: float = 0.5
    ) -> None:
        """Wait for a condition, and record the seconds that it took. Raises AssertionError after the limit."""
        started = time.monotonic()
        try:
            wait_for(name, condition, timeout_s=limit_s, every_s=every_s)
        except AssertionError:
            self.record(row, name, f"not within {limit_s:g}")
            raise
        self.record(row, name, time.monotonic() - started)
