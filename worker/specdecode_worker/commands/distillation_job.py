"""The mode ``distill --job``: every result is a document in the termination message, and the exit code is 0."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdecode_worker.commands.capture_sources import delete_fetched
from specdecode_worker.commands.flags import print_progress
from specdecode_worker.contract import Artifact
from specdecode_worker.contract.distillation import DistillationVerdict
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.termination import write_termination_message
from specdecode_worker.training.distillation.deletion import (
    began_seconds,
    delete_drafts,
    delete_runs,
    delete_text,
)
from specdecode_worker.training.distillation.pipeline import failure_document, verdict_document
from specdecode_worker.training.distillation.publication import (
    RunClock,
    check_place,
    local_place,
    publish,
)
from specdecode_worker.training.distillation.records import Interrupted
from specdecode_worker.training.errors import PublishFailed

MAX_NOT_REPRODUCED = 0.2
"""Largest share of captured text that the target need not reproduce. Near ties of logits lose a few per cent."""


def check_job_flags(args: argparse.Namespace) -> None:
    """End the command with a usage error if a flag needs --job."""
    if args.publish is not None and not args.job:
        args.usage_error("--publish needs --job: the published place is part of the Job's document")
    if args.keep_data and not args.job:
        args.usage_error("--keep-data needs --job: without it the data are kept")
    if args.prune and (not args.job or began_seconds(args.out) is None):
        args.usage_error("--prune needs --job and an --out whose name is the time of the run in hexadecimal digits")
    if args.keep_drafts is not None and not args.prune:
        args.usage_error("--keep-drafts needs --prune")


def run_as_job(distill: Callable[[], dict[str, Any]], args: argparse.Namespace, clock: RunClock) -> DistillationVerdict:
    """Run ``distill``, write the document of its result as the termination message and return it.

    The text of the run is deleted with its verdict, and where it is poisoned: a further run then fetches anew. With
    --prune, earlier runs are deleted before the work, and again after it: a process of theirs may have ended since.

    Raises:
        Interrupted: The run was stopped by a signal. It has no result yet.
    """
    try:
        if args.prune:
            _prune(args)
        if args.publish is not None:
            check_place(args.publish)
        document = distill()
        result = verdict_document(document, _placed_draft(args), clock.seconds)
        if not args.keep_data:
            delete_text(args.out, print_progress)
        if args.prune:
            delete_runs(args.out, print_progress)
    except Interrupted:
        raise
    except Exception as error:
        traceback.print_exc()
        result = failure_document(error, clock.seconds)
        if result.failure == "poisoned":
            delete_fetched(args.out)
            delete_text(args.out, print_progress)
    write_termination_message(result.message())
    return result


def _placed_draft(args: argparse.Namespace) -> Artifact:
    """Return the candidate where workers read it, after publishing it if that is wanted."""
    head: Path = args.out / "head"
    if args.publish is not None:
        return publish(head, args.publish)
    return Artifact(uri=f"file://{head.resolve()}", hash=model_hash(head))


def _prune(args: argparse.Namespace) -> None:
    """Delete earlier runs, and drafts that are not to be kept. What cannot be deleted ends no run."""
    delete_runs(args.out, print_progress)
    if args.publish is None or args.keep_drafts is None:
        return
    try:
        place = local_place(args.publish)
    except PublishFailed:  # `check_place` says so
        return
    if place is not None:
        began = began_seconds(args.out)
        assert began is not None, "check_job_flags"
        delete_drafts(place, frozenset(args.keep_drafts.split(",")), began, print_progress)
