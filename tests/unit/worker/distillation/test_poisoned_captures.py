"""Captures with records that the target or a worker never wrote: nothing is learnt, and the document says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from specdecode_worker.capture import Record
from support.worker.captured_folders import noise, write
from support.worker.job_runs import read, run

pytestmark = pytest.mark.slow


def test_poisoned_capture_teaches_nothing(
    flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    mixed = [*records[:60], *noise(records[60:])]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "mixed", mixed))
    assert run(flags, tmp_path / "out") == 0
    verdict = read(message)
    assert (verdict.verdict, verdict.failure, verdict.draft) == ("failed", "poisoned", None)
    assert "of the captured text, more than 20%" in verdict.reasons[0]
    assert not (tmp_path / "out" / "head").exists()
    assert not (tmp_path / "out" / "checkpoint.pt").exists()
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "good", records))
    assert run(flags, tmp_path / "out") == 0, "the same run reads again, for good captures may be there by now"
    assert read(message).verdict == "inconclusive"


FORGED: dict[str, dict[str, float]] = {
    "share-0": {"share": 0.0},
    "share-negative": {"share": -1.0},
    "share-tiny": {"share": 1e-12},
    "share-nan": {"share": float("nan")},
    "share-infinite": {"share": float("inf")},
    "time-nan": {"time_seconds": float("nan")},
    "time-infinite": {"time_seconds": float("inf")},
    "time-future": {"time_seconds": 1e12},
}
"""Fields of records that no worker writes."""


@pytest.mark.parametrize("kind", ["share-nan", "time-future"])
def test_forged_records_teach_nothing(
    kind: str, flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    forged = [msgspec.structs.replace(record, **FORGED[kind]) for record in records[60:]]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "mixed", [*records[:60], *forged]))
    assert run(flags, tmp_path / "out") == 0
    verdict = read(message)
    assert (verdict.verdict, verdict.failure, verdict.draft) == ("failed", "poisoned", None)
    assert "none that a worker writes" in verdict.reasons[0]
    assert not (tmp_path / "out" / "head").exists()
    assert not (tmp_path / "out" / "checkpoint.pt").exists()


def test_few_forged_records_do_not_change_the_draft(
    flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    assert run(flags, tmp_path / "honest") == 0
    honest = read(message)
    forged = [msgspec.structs.replace(records[i], opening=f"{i}", **fields) for i, fields in enumerate(FORGED.values())]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "mixed", [*records, *forged]))
    assert run(flags, tmp_path / "mixed-out") == 0
    mixed = read(message)
    assert (mixed.draft.hash, mixed.conversations) == (honest.draft.hash, honest.conversations)


def test_few_changed_records_are_dropped(
    flags: list[str], records: Sequence[Record], tmp_path: Path, message: Path
) -> None:
    mixed = [*records[:85], *noise(records[85:])]
    flags[flags.index("--capture") + 1] = str(write(tmp_path / "mixed", mixed))
    assert run(flags, tmp_path / "out") == 0
    assert read(message).verdict == "inconclusive"
