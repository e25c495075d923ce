"""Runs of ``distill --job`` in the process of a test, and their documents."""

from __future__ import annotations

from pathlib import Path

from specdecode_worker.__main__ import main
from specdecode_worker.contract import MAX_VERDICT_BYTES
from specdecode_worker.contract.distillation import DistillationVerdict


def run(flags: list[str], out: Path, *more: str) -> int:
    return main(["distill", *flags, "--out", str(out), *more])


def read(message: Path) -> DistillationVerdict:
    """Return the document of the termination message, which is removed."""
    text = message.read_text()
    message.unlink()
    assert len(text.encode()) <= MAX_VERDICT_BYTES
    return DistillationVerdict.model_validate_json(text)
