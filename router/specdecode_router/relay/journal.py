"""Journal of one request: what its choices have produced so far, so that another worker can continue it."""

from __future__ import annotations

from array import array

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


class _Choice:
    """Progress of one choice."""

    __slots__ = ("counters", "ids", "logprobs", "prompt_logprobs")

    def __init__(self) -> None:
        self.ids = array("I")
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: tuple[Logprobs, ...] = ()
        self.counters = ChoiceCounters()

    def progress(self) -> ChoiceProgress:
        return ChoiceProgress(
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
            counters=self.counters,
        )


class Journal:
    """Output of a request since its ``Open``."""

    __slots__ = ("_choices", "open", "tokens")

    def __init__(self, opened: Open) -> None:
        self.open = opened
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
        try:
            choice.ids.extend(step.ids)
        except (OverflowError, TypeError):
            raise WorkerFailed("it sent a token id that is not in 0..2^32-1") from None
        choice.logprobs += step.logprobs
        if step.prompt_logprobs:
            choice.prompt_logprobs = step.prompt_logprobs
        choice.counters = step.counters
        return True

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of all choices that were not in a cache of their worker."""
        prompts = self.open.prompts
        return sum(
            max(len(prompts[start.prompt]) - choice.counters.cached_tokens, 0)
            for start, choice in zip(self.open.choices, self._choices, strict=True)
        )

    def resume(self) -> Resume:
        """Return what another worker needs to continue the request."""
        return Resume(open=self.open, choices=tuple(choice.progress() for choice in self._choices))
