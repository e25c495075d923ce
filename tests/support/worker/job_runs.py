"""Runs of ``distill --job`` in the process of a test, and their documents."""

from __future__ import annotations

from pathlib import Path

from specdecode_worker.__main__ import main
from specdecode_worker.contract import MAX_VERDICT_BYTES
from specdecode_worker.contract.distillation import DistillationVerdict


def run(flags: list[str], out: Path, *more: str) -> int:
    return main(["distill", *flags, "--out", str(out), *more])


def run_job(message: Path, flags: list[str], out: Path, *more: str) -> DistillationVerdict:
    """Run a Job, which exits with 0 whatever comes of it, and return the document of its termination message."""
    assert run(flags, out, *more) == 0
    text = message.read_text()
    message.unlink()
    assert len(text.encode()) <= MAX_VERDICT_BYTES
    return DistillationVerdict.model_validate_json(text)
