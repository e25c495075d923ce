"""Which requests are captured, and one of them as a record once it is over.

The client decides first: ``metadata.capture`` or the header below, and only a clear yes is one. Then chance does.
"""

from __future__ import annotations

import time

import msgspec

from specdecode_worker.capture import Dropped, Record, Recorder, opening_of
from specdecode_worker.contract import Sampler
from specdecode_worker.engine.ipc.messages import Sampling, Tokens
from specdecode_worker.server.requests import GenerationRequest
from specdecode_worker.server.text.prompts import Prompt

CAPTURE_HEADER = "X-Specdecode-Capture"
_YES = ("true", "on")


def allowed(header: str | None, request: GenerationRequest) -> bool:
    """Whether the client lets its request be captured; who says nothing does, who says anything but yes does not."""
    said = [value for name, value in request.metadata.items() if name == "capture"]
    said += [header] if header is not None else []
    return all(str(one).strip().lower() in _YES for one in said)


class Capturing:
    """A worker's captured requests. ``target`` is the hash of its weights."""

    def __init__(self, recorder: Recorder, target: str, sampler: Sampler) -> None:
        self._recorder, self._target, self._sampler = recorder, target, sampler

    def watch(self, prompt: Prompt, sampling: Sampling, task: str) -> Watch | None:
        """None where chance leaves it out, or where its text could not be checked by replay."""
        if not self._recorder.draws(task):
            return None
        if self._sampler == "mss" and sampling.temperature > 0:
            self._recorder.counts.dropped[Dropped.not_repeatable] += 1
            return None
        plain = msgspec.structs.replace(sampling, logprobs=None, prompt_logprobs=None)
        return Watch(self._recorder, self._target, prompt, plain, task)

    def opted_out(self) -> None:
        self._recorder.counts.dropped[Dropped.opted_out] += 1


class Watch:
    """Sees every message of one request, in order."""

    __slots__ = ("_failed", "_out", "_over", "_prompt", "_recorder", "_sampling", "_target", "_task")

    def __init__(self, recorder: Recorder, target: str, prompt: Prompt, sampling: Sampling, task: str) -> None:
        self._recorder, self._target = recorder, target
        self._prompt, self._sampling, self._task = prompt, sampling, task
        self._out: list[int] = []
        self._over = self._failed = False

    def take(self, tokens: Tokens) -> None:
        self._out += tokens.tokens
        self._failed = self._failed or tokens.finish == "error"

    def end(self) -> None:
        """The request is over, at whatever end: what the target said until then is what it says. Counts once."""
        if self._over or self._failed or not self._out:
            return
        self._over = True
        ids = tuple(self._prompt.ids)
        self._recorder.offer(
            Record(
                tokens=(*ids, *self._out),
                prompt_length=len(ids),
                sampling=self._sampling,
                target=self._target,
                task=self._task,
                time_seconds=time.time(),
                opening=opening_of(self._prompt.opening),
                share=self._recorder.share_of(self._task),
            )
        )
