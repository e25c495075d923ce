"""Journal of one request: what its choices have produced so far, so that another worker can continue it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from specdecode_router.errors import WorkerFailed
from specdecode_worker.contract.internal_stream import (
    ChoiceCounters,
    ChoiceProgress,
    Logprobs,
    Open,
    Resume,
    Step,
)

MAX_TOKENS = 4 * 1024 * 1024
"""Tokens of one request. A worker that sends more does not follow its own limits; a token takes four bytes here."""
_logprobs_decoder = msgspec.msgpack.Decoder(tuple[Logprobs, ...])


class _Choice:
    """Progress of one choice."""

    __slots__ = ("counters", "ids", "logprobs", "prompt_logprobs")

    def __init__(self) -> None:
        self.ids = array("I")
        self.logprobs: list[bytes] = []
        """Log-probabilities of each step as msgpack: a fifth of the memory of tuples, which take 1.5 KB a token for the
        best 20."""
        self.prompt_logprobs: list[bytes] = []
        """Those of the prompt, in one part; empty without them."""
        self.counters = ChoiceCounters()

    def progress(self) -> ChoiceProgress:
        return ChoiceProgress(
            ids=tuple(self.ids),
            logprobs=_unpacked(self.logprobs),
            prompt_logprobs=_unpacked(self.prompt_logprobs),
            counters=self.counters,
        )


def _unpacked(parts: Iterable[bytes]) -> tuple[Logprobs, ...]:
    return tuple(one for part in parts for one in _logprobs_decoder.decode(part))


def _array_of(ids: Iterable[int]) -> array[int]:
    """Return token ids in four bytes each. Raises WorkerFailed for one that does not fit."""
    try:
        return array("I", ids)
    except (OverflowError, TypeError):
        raise WorkerFailed("it sent a token id that is not in 0..2^32-1") from None


class Journal:
    """Output of a request since its ``Open``."""

    __slots__ = ("_choices", "_prompts", "open", "tokens")

    def __init__(self, opened: Open) -> None:
        """Begin with the first frame. Raises WorkerFailed for a prompt with an id that is no token."""
        self._prompts = [_array_of(prompt) for prompt in opened.prompts]
        self.open = msgspec.structs.replace(opened, prompts=())
        """First frame, without its prompts."""
        self._choices = [_Choice() for _ in opened.choices]
        self.tokens = 0
        """Number of tokens of all choices."""

    def add(self, step: Step) -> bool:
        """Append a step. Return False, and change nothing, if the choice has its first token already.

        Raises:
            WorkerFailed: The step leaves tokens out, or names a choice that the request does not have.
        """
        if not 0 <= step.choice < len(self._choices):
            raise WorkerFailed(f"it sent a step of choice {step.choice}; the request has {len(self._choices)}")
        choice = self._choices[step.choice]
        if step.index != len(choice.ids):
            if step.index > len(choice.ids):
                raise WorkerFailed(f"it sent token {step.index} of a choice that has {len(choice.ids)} tokens")
            return False
        self.tokens += len(step.ids)
        if self.tokens > MAX_TOKENS:
            raise WorkerFailed(f"it sent more than {MAX_TOKENS} tokens")
        choice.ids.extend(_array_of(step.ids))
        if step.logprobs:
            choice.logprobs.append(msgspec.msgpack.encode(step.logprobs))
        if step.prompt_logprobs:
            choice.prompt_logprobs = [msgspec.msgpack.encode(step.prompt_logprobs)]
        choice.counters = step.counters
        return True

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of all choices that were not in a cache of their worker."""
        return sum(
            max(len(self._prompts[start.prompt]) - choice.counters.cached_tokens, 0)
            for start, choice in zip(self.open.choices, self._choices, strict=True)
        )

    def resume(self) -> Resume:
        """Return what another worker needs to continue the request."""
        opened = msgspec.structs.replace(self.open, prompts=tuple(map(tuple, self._prompts)))
        return Resume(open=opened, choices=tuple(choice.progress() for choice in self._choices))
