"""Traffic capture: selects the requests to capture and builds a record from each finished one.

The client decides first, with ``metadata.capture`` or the header `CAPTURE_HEADER`. The requests that the client
permits are then sampled at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec

from specdecode_worker.capture import Dropped, Record, Recorder, opening_hash
from specdecode_worker.capture.segments import DeletionCounts
from specdecode_worker.contract import Sampler
from specdecode_worker.core.messages import Sampling, Tokens
from specdecode_worker.server.prompts import Prompt
from specdecode_worker.server.requests import GenerationRequest

StartRecord = Callable[[Prompt, Sampling, str, str | None], "RecordBuilder | None"]
"""Starts the record of one choice from its prompt, sampling parameters, task and user; None if it is not captured."""
CAPTURE_HEADER = "X-Specdecode-Capture"
_YES = ("true", "on")
_LONGEST_REQUEST_SECONDS = 86400.0
"""Time after which no request runs any more that began before a deletion."""


def capture_permitted(header: str | None, request: GenerationRequest) -> bool | None:
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
        or if its text could not be verified by a replay (the mss sampler at a temperature above 0).
        """
        recorder = self.recorder
        if not recorder.is_on or (recorder.consent == "OptIn" and permitted is None):
            return None
        if not recorder.should_capture(task):
            return None
        if self._sampler == "mss" and sampling.temperature > 0:
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

    def for_request(self, permitted: bool | None) -> StartRecord | None:
        """Return the function that starts the records of one request; None if the client forbids it."""
        if permitted is False:
            if self.recorder.is_on:
                self.recorder.counts.drop(Dropped.opted_out)
            return None
        return partial(self.start_record, permitted=permitted)

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

    __slots__ = ("_began", "_capture", "_ended", "_epoch", "_failed", "_output", "_record")

    def __init__(self, capture: RequestCapture, record: Record) -> None:
        self._capture, self._record = capture, record
        self._began, self._epoch = time.monotonic(), capture.recorder.epoch
        self._output: list[int] = []
        self._ended = self._failed = False

    def process(self, tokens: Tokens) -> None:
        """Append the tokens of one message."""
        self._output += tokens.tokens
        self._failed = self._failed or tokens.finish == "error"

    def end(self, finish_reason: str | None = None, *, moved: bool = False) -> None:
        """Offer the record to the recorder, once.

        A cancelled request is captured too: the tokens generated until then are valid output of the target. A request
        with an engine error or without output is not captured. If the request ``moved`` to another worker, the tokens
        of this one are captured here, and the others nowhere.
        """
        if self._ended or self._failed or not self._output:
            return
        self._ended = True
        recorder = self._capture.recorder
        if self._capture.was_deleted(self._record.user, self._began):
            recorder.counts.drop(Dropped.deleted)
            return
        tokens = (*self._record.tokens, *self._output)
        recorder.enqueue(msgspec.structs.replace(self._record, tokens=tokens, time_seconds=time.time()), self._epoch)
