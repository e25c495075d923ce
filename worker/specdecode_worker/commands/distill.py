"""Command ``distill``: train a better draft from captured traffic and compare it with the deployed draft.

The work is done by ``training.distillation``. SIGTERM and SIGINT stop the command between two pieces of work; all
finished work is kept. ``--job`` runs it as a Kubernetes Job (commands/distillation_job.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from specdecode_worker.capture import CaptureError
from specdecode_worker.commands.capture_sources import (
    capture_folders,
    check_capture_flags,
    delete_fetched,
)
from specdecode_worker.commands.distillation_job import (
    MAX_NOT_REPRODUCED,
    check_job_flags,
    run_as_job,
)
from specdecode_worker.commands.flags import print_progress, settings_of
from specdecode_worker.contract import TreeShape, adapted_uri
from specdecode_worker.engine.factory import device_of
from specdecode_worker.models.errors import ModelError
from specdecode_worker.training.artifacts import Ancestor, check_same_target
from specdecode_worker.training.conversations import Chat
from specdecode_worker.training.distillation.deletion import delete_expired_from_runs, expiry_seconds
from specdecode_worker.training.distillation.judge import answer_prompts
from specdecode_worker.training.distillation.pipeline import Distillation, DistillationSettings, stored_verdict
from specdecode_worker.training.distillation.publication import RunClock
from specdecode_worker.training.distillation.records import Interrupted, Stopped
from specdecode_worker.training.distillation.students import StudentSettings
from specdecode_worker.training.errors import TimeLimitReached, TrainingError
from specdecode_worker.training.split_target import TargetPlacement, placed_target

INTERRUPTED = 143
"""Exit code after a stop: 128 + SIGTERM, as for a process without a handler, so that a Kubernetes Job restarts it."""


def run(args: argparse.Namespace) -> int:
    """Return the exit code listed in the epilog of the help text."""
    check_capture_flags(args)
    check_job_flags(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    clock = RunClock(args.out / "clock.json", args.time_limit)
    try:
        with _stoppable() as stop, clock.running():
            return _run_job(args, stop, clock) if args.job else _run(args, stop, clock)
    except Interrupted:
        print_progress("distill: stopped; the same command goes on from here")
        return INTERRUPTED


def _run_job(args: argparse.Namespace, stop: threading.Event, clock: RunClock) -> int:
    """Run as a Job, print the document of the result and return 0."""
    result = run_as_job(lambda: _distill(args, stop, clock), args, clock)
    print(result.model_dump_json(indent=2, exclude_none=True))
    return 0


def _run(args: argparse.Namespace, stop: threading.Event, clock: RunClock) -> int:
    """Run, print the verdict and return its exit code."""
    try:
        document = _distill(args, stop, clock)
    except (TrainingError, CaptureError, ModelError) as error:
        print(f"specdecode-worker distill: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2))
    code: int = document["exit_code"]
    return code


@contextlib.contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _distill(args: argparse.Namespace, stop: threading.Event, clock: RunClock) -> dict[str, Any]:
    """Run the distillation and return its result document.

    Raises:
        Interrupted: A signal stopped the run.
        TimeLimitReached: The run took longer than --time-limit.
    """

    def stopped() -> bool:
        return stop.is_set() or clock.is_over

    document = stored_verdict(args.out)
    try:
        document = document or _run_pipeline(args, stopped)
    except Interrupted:
        if stop.is_set():
            raise
        raise TimeLimitReached(f"the run took more than --time-limit {args.time_limit:g} seconds") from None
    delete_fetched(args.out)
    return document


def _run_pipeline(args: argparse.Namespace, stopped: Stopped) -> dict[str, Any]:
    """Fetch captured segments where they are wanted, and run all remaining stages."""
    args.out.mkdir(parents=True, exist_ok=True)
    settings = _settings(args)
    capture = capture_folders(args, print_progress, stopped)
    oldest_seconds = expiry_seconds(capture, time.time())
    # A run that was suspended goes on without what has expired since.
    delete_expired_from_runs([args.out, *args.replay], oldest_seconds, print_progress)
    target, parent = (Ancestor.of(uri, args.cache_dir) for uri in (adapted_uri(args.model, args.adapter), args.draft))
    check_same_target(args.out, target)
    job = settings_of(
        DistillationSettings,
        args,
        target=target,
        parent=parent,
        capture=capture,
        replay=tuple(args.replay),
        settings=settings,
        shape=args.shape or TreeShape.chain(3),
        wanted_gain=args.min_gain,
        oldest_seconds=max(oldest_seconds, time.time() - args.max_age if args.max_age else 0.0),
        most_tokens=args.capture_tokens,
        golden_tokens=args.max_tokens,
        max_not_reproduced=MAX_NOT_REPRODUCED if args.job else 1.0,
    )
    device = device_of(args.device)
    placement = settings_of(TargetPlacement, args, folder=target.folder, device=device, size=args.tensor_parallel_size)
    print_progress(f"distill: answering the prompts of {', '.join(map(str, job.asked.values())) or 'no file'}")
    chat = Chat(target.folder)
    answers = answer_prompts(placement, chat, job.asked, answer_tokens=job.golden_tokens, stopped=stopped)
    with placed_target(placement) as model:
        return Distillation(model, answers, job, print_progress, stopped).run()


def _settings(args: argparse.Namespace) -> StudentSettings:
    """Build the training settings from the flags.

    Raises:
        TrainingError: A value is out of range; the message names the flag.
    """
    if args.golden is None and not args.job:
        raise TrainingError("--golden is needed without --job")
    if not 0 <= args.replay_share < 1:
        raise TrainingError(f"--replay-share is {args.replay_share}; it is a share of a round, from 0 to below 1")
    for name in ("steps", "minutes", "round_steps", "patience", "unroll", "batch_tokens", "time_limit"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise TrainingError(f"--{name.replace('_', '-')} must be above 0")
    return settings_of(StudentSettings, args, depth=args.unroll)
