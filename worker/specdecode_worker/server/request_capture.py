"""Traffic capture: selects the requests to capture and builds a record from each finished one.

The client decides first, with ``metadata.capture`` or the header `CAPTURE_HEADER`. The requests that the client
permits are then sampled at random.
"""

from __future__ import annotations

import time

import msgspec

from specdecode_worker.capture import Dropped, Record, Recorder, opening_hash, user_hash
from specdecode_worker.contract import Sampler
from specdecode_worker.engine.ipc.messages import Sampling, Tokens
from specdecode_worker.server.requests import GenerationRequest
from specdecode_worker.server.text.prompts import Prompt

CAPTURE_HEADER = "X-Specdecode-Capture"
_YES = ("true", "on")


def capture_permitted(header: str | None, request: GenerationRequest) -> bool:
    """Return whether the client permits the capture of its request.

    A request with neither the header nor ``metadata.capture`` is permitted. If one is present, its value must be
    "true" or "on".
    """
    values = [value for name, value in request.metadata.items() if name == "capture"]
    values += [header] if header is not None else []
    return all(str(one).strip().lower() in _YES for one in values)


class RequestCapture:
    """Request capture of one worker. ``target`` is the hash of the target's weights."""

    def __init__(self, recorder: Recorder, target: str, sampler: Sampler) -> None:
        self._recorder, self._target, self._sampler = recorder, target, sampler

    def start_record(
        self, prompt: Prompt, sampling: Sampling, task: str, user: str | None = None
    ) -> RecordBuilder | None:
        """Return the observer that records one request, or None when the request is not captured.

        A request is not captured if the random sample leaves it out, or if its text could not be verified by a replay
        (the mss sampler at a temperature above 0).
        """
        if not self._recorder.should_capture(task):
            return None
        if self._sampler == "mss" and sampling.temperature > 0:
            self._recorder.counts.dropped[Dropped.not_repeatable] += 1
            return None
        plain = msgspec.structs.replace(sampling, logprobs=None, prompt_logprobs=None)
        return RecordBuilder(self._recorder, self._target, prompt, plain, task, user_hash(user) if user else "")

    def opted_out(self) -> None:
        """Count a request that the client does not permit to capture."""
        self._recorder.counts.dropped[Dropped.opted_out] += 1


class RecordBuilder:
    """Collector of the output tokens of one captured request; receives every message of it in order."""

    __slots__ = ("_ended", "_failed", "_output", "_prompt", "_recorder", "_sampling", "_target", "_task", "_user")

    def __init__(
        self, recorder: Recorder, target: str, prompt: Prompt, sampling: Sampling, task: str, user: str
    ) -> None:
        self._recorder, self._target, self._user = recorder, target, user
        self._prompt, self._sampling, self._task = prompt, sampling, task
        self._output: list[int] = []
        self._ended = self._failed = False

    def process(self, tokens: Tokens) -> None:
        """Append the tokens of one message."""
        self._output += tokens.tokens
        self._failed = self._failed or tokens.finish == "error"

    def end(self, *, moved: bool = False) -> None:
        """Offer the record to the recorder, once.

        A cancelled request is captured too: the tokens generated until then are valid output of the target. A request
        with an engine error or without output is not captured. If the request ``moved`` to another worker, the tokens
        of this one are captured here, and the others nowhere.
        """
        if self._ended or self._failed or not self._output:
            return
        self._ended = True
        ids = tuple(self._prompt.ids)
        self._recorder.enqueue(
            Record(
                tokens=(*ids, *self._output),
                prompt_length=len(ids),
                sampling=self._sampling,
                target=self._target,
                task=self._task,
                time_seconds=time.time(),
                opening=opening_hash(self._prompt.opening),
                share=self._recorder.share_of(self._task),
                user=self._user,
            )
        )
