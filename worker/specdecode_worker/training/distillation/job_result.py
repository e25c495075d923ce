"""Document of a distillation Job: from the verdict of a run, or from the error that ended it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from specdecode_worker.capture import CaptureError
from specdecode_worker.contract import Artifact
from specdecode_worker.contract.distillation import (
    MAX_DOMAINS,
    DistillationFailure,
    DistillationVerdict,
    DomainGain,
    GainBounds,
    shortened_name,
    shortened_reason,
)
from specdecode_worker.models.errors import ModelError
from specdecode_worker.training.errors import PoisonedCapture, PublishFailed, TimeLimitReached, TrainingError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# safetensors and torch.save raise errors of their own, with the number of the system's error or without it.
_NO_SPACE_TEXT = re.compile(
    rf"No space left on device|Disk quota exceeded|os error ({errno.ENOSPC}|{errno.EDQUOT})\b"
    r"|PytorchStreamWriter failed|inline_container.*unexpected pos|iostream error"
)
_NO_MEMORY_TEXT = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|bad_alloc")
_MAX_REASONS = 8


def verdict_document(document: Mapping[str, Any], draft: Artifact, seconds: float) -> DistillationVerdict:
    """Return the Job's document for a verdict of ``distill``.

    Args:
        document: Content of verdict.json.
        draft: The candidate.
        seconds: Time of the run.
    """
    domains = [
        DomainGain(name=shortened_name(name), kind=part["kind"], conversations=part["conversations"], gain=part["gain"])
        for name, part in document["domains"].items()
    ]
    for name, pool in document["pools"].items():
        count = sum(document["domains"][member]["conversations"] for member in pool["domains"])
        domains.append(DomainGain(name=shortened_name(name), kind="pool", conversations=count, gain=pool["gain"]))
    gain = document["gain"]
    return DistillationVerdict(
        verdict=document["verdict"],
        reasons=tuple(shortened_reason(reason) for reason in document["reasons"][:_MAX_REASONS]),
        gain=None if gain is None else GainBounds.model_validate(gain),
        domains=tuple(domains[:MAX_DOMAINS]),
        domains_left_out=max(0, len(domains) - MAX_DOMAINS),
        draft=draft,
        conversations=sum(sum(counts.values()) for counts in document["capture"]["conversations"].values()),
        seconds=round(seconds, 1),
    )


def failure_document(error: BaseException, seconds: float) -> DistillationVerdict:
    """Return the Job's document for an error that ended the run."""
    return DistillationVerdict(
        verdict="failed",
        failure=failure_kind(error),
        reasons=(shortened_reason(str(error) or type(error).__name__),),
        seconds=round(seconds, 1),
    )


def failure_kind(error: BaseException) -> DistillationFailure:
    """Return the kind of failure of an error, from the error itself and those that caused it."""
    chain = list(_chain(error))
    if any(_is_disk_full(one) for one in chain):
        return "disk-full"
    if any(_is_out_of_memory(one) for one in chain):
        return "out-of-memory"
    match error:
        case PoisonedCapture():
            return "poisoned"
        case TimeLimitReached():
            return "time-limit"
        case PublishFailed():
            return "publish"
        case CaptureError():
            return "capture"
        case TrainingError() | ModelError():
            return "input"
    return "error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def _is_disk_full(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in _NO_SPACE) or bool(_NO_SPACE_TEXT.search(str(error)))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY_TEXT.search(str(error)))
