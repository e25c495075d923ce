"""Parts of a response, before they are formatted for a route."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.engine.ipc.messages import Logprobs


@dataclass(frozen=True, slots=True)
class Statistics:
    """Token and speculation counts of one choice.

    ``drafts`` is the number of steps with a draft, ``accepted`` the number of accepted draft tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafts: int
    draft_tokens: int
    accepted: int
    counts_prompt: bool = True
    """False for the further choices of a prompt, so that its tokens count once in the usage."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Token with its log-probabilities and the character ``offset`` at which it begins in the returned text.

    The first token of a prompt has no log-probabilities, because no token precedes it.
    """

    token: int
    offset: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """New text of a choice, with its scored tokens if log-probabilities are requested.

    Only the last piece of a choice has a ``finish_reason``.
    """

    text: str
    finish_reason: str | None
    scored: tuple[ScoredToken, ...] = ()

    @property
    def is_shown(self) -> bool:
        """True if the piece changes the response."""
        return bool(self.text or self.scored or self.finish_reason)


@dataclass(frozen=True, slots=True)
class Choice:
    """Finished choice. ``mean_logprob`` is the mean per token; 0 if the engine returned no log-probabilities."""

    text: str
    finish_reason: str
    statistics: Statistics
    scored: tuple[ScoredToken, ...] = ()
    mean_logprob: float = 0.0
