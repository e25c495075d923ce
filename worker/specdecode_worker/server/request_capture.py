"""Traffic capture: its start, and selection of the requests to capture, with a record of each finished one.

The client decides first, with ``metadata.capture`` or the header `CAPTURE_HEADER`. The requests that the client
permits are then sampled at random.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from specdecode_worker.capture import CaptureError, Dropped, Record, Recorder, opening_hash
from specdecode_worker.capture.records import load_hook
from specdecode_worker.capture.segments import DeletionCounts, Retention, SegmentWriter
from specdecode_worker.contract import CaptureConfig, CaptureRules, Env, Plan, Sampler, WorkerConfig
from specdecode_worker.core.messages import Tokens
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.server.admission import Scope
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.prompts import Prompt
from specdecode_worker.server.requests import GenerationRequest

log = logging.getLogger(__name__)

StartRecord = Callable[[Prompt, Sampling, str], "RecordBuilder | None"]
"""Starts the record of one choice from its prompt, sampling parameters and task; None if it is not captured."""
CAPTURE_HEADER = "X-Specdecode-Capture"
_YES = ("true", "on")
_LONGEST_REQUEST_SECONDS = 86400.0
"""Time after which no request runs any more that began before a deletion."""


def _permitted(header: str | None, request: GenerationRequest) -> bool | None:
    """Return whether the client permits the capture of its request; None if it does not say.

    If the header and ``metadata.capture`` are present, both must permit it, with the value "true" or "on".
    """
    values = [value for name, value in request.metadata.items() if name == "capture"]
    values += [header] if header is not None else []
    return all(str(one).strip().lower() in _YES for one in values) if values else None


class RequestCapture:
    """Request capture of one worker. ``target`` is the hash of the target's weights."""

    def __init__(self, recorder: Recorder, target: str, sampler: Sampler) -> None:
        self.recorder, self._target, self._sampler = recorder, target, sampler
        self._deleted: dict[str, float] = {}
        """Time of the last deletion by hash of a user, on the monotonic clock."""

    def start_record(
        self, prompt: Prompt, sampling: Sampling, task: str, user: str | None = None, permitted: bool | None = None
    ) -> RecordBuilder | None:
        """Return the observer that records one request, or None when the request is not captured.

        A request is not captured if it lacks a permission that the recorder needs, if the random sample leaves it out,
        or if its text could not be verified by a replay (a grammar, or the mss sampler at a temperature above 0).
        """
        recorder = self.recorder
        if not recorder.is_on or (recorder.consent == "OptIn" and permitted is None):
            return None
        if not recorder.should_capture(task):
            return None
        if sampling.grammar or (self._sampler == "mss" and sampling.temperature > 0):
            recorder.counts.drop(Dropped.not_repeatable)
            return None
        record = Record(
            tokens=tuple(prompt.ids),
            prompt_length=len(prompt.ids),
            sampling=msgspec.structs.replace(sampling, logprobs=None, prompt_logprobs=None),
            target=self._target,
            task=task,
            time_seconds=0.0,
            opening=opening_hash(prompt.opening),
            share=recorder.share_of(task),
            user=recorder.subject_of(user),
            permitted=permitted is True,
        )
        return RecordBuilder(self, record)

    def for_request(self, header: str | None, request: GenerationRequest) -> StartRecord | None:
        """Return the function that starts the records of one request; None if the client forbids it.

        Args:
            header: Value of the header `CAPTURE_HEADER`.
            request: The validated request body.
        """
        permitted = _permitted(header, request)
        if permitted is False:
            if self.recorder.is_on:
                self.recorder.counts.drop(Dropped.opted_out)
            return None
        return partial(self.start_record, user=request.user, permitted=permitted)

    def delete_user(self, user: str) -> DeletionCounts:
        """Delete the records of a user. Requests of this user that are running are not captured. It blocks.

        Raises:
            FolderUnusable: The folder cannot be read, or a segment cannot be replaced.
        """
        now = time.monotonic()
        hashes = self.recorder.user_hashes(user).hashes
        recent = {known: at for known, at in self._deleted.items() if at > now - _LONGEST_REQUEST_SECONDS}
        self._deleted = recent | dict.fromkeys(hashes, now)
        return self.recorder.delete_user(user)

    def was_deleted(self, user: str, began: float) -> bool:
        """Return whether the records of the user with this hash were deleted after ``began`` (monotonic)."""
        return bool(user) and self._deleted.get(user, 0.0) > began


class RecordBuilder:
    """Collector of the output tokens of one captured request; receives every message of it in order."""

    __slots__ = ("_began", "_capture", "_epoch", "_failed", "_output", "_record")

    def __init__(self, capture: RequestCapture, record: Record) -> None:
        self._capture, self._record = capture, record
        self._began, self._epoch = time.monotonic(), capture.recorder.epoch
        self._output: list[int] = []
        self._failed = False

    def process(self, tokens: Tokens) -> None:
        """Append the tokens of one message."""
        self._output += tokens.tokens
        self._failed = self._failed or tokens.finish == "error"

    def end(self, finish_reason: str | None = None, *, moved: bool = False) -> None:
        """Offer the record to the recorder.

        A cancelled request is captured too: the tokens generated until then are valid output of the target. A request
        with an engine error or without output is not captured. If the request ``moved`` to another worker, the tokens
        of this one are captured here, and the others nowhere.
        """
        if self._failed or not self._output:
            return
        recorder = self._capture.recorder
        if self._capture.was_deleted(self._record.user, self._began):
            recorder.counts.drop(Dropped.deleted)
            return
        tokens = (*self._record.tokens, *self._output)
        recorder.enqueue(msgspec.structs.replace(self._record, tokens=tokens, time_seconds=time.time()), self._epoch)


# Capture recorder of the server process: its start and end.

_CLOSE_SECONDS = 2.0
"""Time for the thread to write what it holds. It runs while the engine ends."""


def open_recorder(config: WorkerConfig, plan: Plan) -> Recorder | None:
    """Open the capture recorder with the rules of the configuration, else with those of the plan.

    Returns None without a folder for either.

    Raises:
        CannotStart: The folder or the hook of the configuration cannot be used. Problems of the plan's rules, and all
            that arise later, are in the worker's report.
    """
    read_token = _operator_token(config.server.admin_tokens_path)
    if config.capture is not None:
        try:
            return _configured(config.capture, read_token)
        except CaptureError as error:
            raise CannotStart(f"capture: {error}") from None
    if config.capture_dir is not None:
        return Recorder(Path(config.capture_dir), plan.capture, read_token=read_token)
    if plan.capture is not None:
        log.warning("the plan switches capture on, but this worker has no folder for it (capture_dir)")
    return None


def _configured(config: CaptureConfig, read_token: Callable[[], str | None]) -> Recorder:
    """Open the recorder of the configuration. Raise CaptureError if its folder or its hook cannot be used."""
    folder = Path(config.dir)
    if config.redact is not None:
        load_hook(config.redact)
    SegmentWriter(folder, Retention(config.max_age_seconds, config.max_bytes))
    return Recorder(folder, CaptureRules(**config.model_dump(exclude={"dir"})), read_token=read_token)


def _operator_token(folder: str | None) -> Callable[[], str | None]:
    """Return the reader of the current admin token with the scope operator; it returns None without one."""
    given = os.environ.get(Env.admin_token, "").strip() or None

    def read() -> str | None:
        if folder is not None:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                lines = (Path(folder) / Scope.operator).read_text().split()
                if lines:
                    return lines[0]
        return given

    return read


async def close_recorder(recorder: Recorder | None) -> None:
    """Close the recorder in a thread of its own: those of the event loop may all be busy."""
    if recorder is None:
        return
    executor = ThreadPoolExecutor(1)
    await asyncio.get_running_loop().run_in_executor(executor, recorder.close, _CLOSE_SECONDS)
    executor.shutdown(wait=False)
