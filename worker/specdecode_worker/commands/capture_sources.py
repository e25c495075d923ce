"""Flags that name the captured records of ``distill``: folders, and workers to fetch segments from."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from specdecode_worker.capture.puller import FETCHED_FOLDER, pull_segments, pull_source
from specdecode_worker.contract import Env
from specdecode_worker.training.distillation.deletion import is_distillation_run
from specdecode_worker.training.distillation.records import Interrupted


def check_capture_flags(args: argparse.Namespace) -> None:
    """End the command with a usage error if no records are named."""
    if not args.capture and args.capture_from is None:
        args.usage_error("name the captured records with --capture DIR or --capture-from HOST:PORT")


def capture_folders(
    args: argparse.Namespace, log: Callable[[str], None], stopped: Callable[[], bool]
) -> tuple[Path, ...]:
    """Return the folders of segments, after fetching those of the workers into OUT/captured.

    Nothing is fetched once the run has selected its records: a resumed run uses the same ones.

    Raises:
        CapturePullFailed: The workers' segments cannot be fetched.
        Interrupted: ``stopped`` returned True.
    """
    if args.capture_from is None:
        return tuple(args.capture)
    folder = args.out / FETCHED_FOLDER
    if not is_distillation_run(args.out):
        source = pull_source(args.capture_from, os.environ.get(Env.capture_token), args.capture_ca)
        result = pull_segments(source, folder, log, stopped)
        if stopped():  # a part of the segments must not become the run's selection
            raise Interrupted
        log(
            f"distill: {result.fetched} segments fetched from {result.workers} workers, {result.known} known before, "
            f"{result.over_bound} beyond {source.max_bytes / 2**30:g} GiB"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return (*args.capture, folder)


def delete_fetched(out: Path) -> None:
    """Delete the fetched segments of a run that has its verdict. The workers' own copies are not changed."""
    shutil.rmtree(out / FETCHED_FOLDER, ignore_errors=True)
