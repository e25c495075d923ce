"""What answers are made of."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.engine.ipc.messages import Logprobs


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one answer took; ``drafts`` is steps with a draft, ``accepted`` the draft tokens that were kept."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafts: int
    draft_tokens: int
    accepted: int
    counts_prompt: bool = True
    """Several answers to one prompt count its tokens once."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the text that begins at character ``offset`` of it. The first token of a prompt has no logprobs:
    nothing stands before it."""

    token: int
    offset: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, and the tokens of it where log-probabilities were asked for; ``finish_reason`` closes the answer."""

    text: str
    finish_reason: str | None
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished answer. ``mean_logprob`` is per token, where the engine told them."""

    text: str
    finish_reason: str
    statistics: Statistics
    scored: tuple[Scored, ...] = ()
    mean_logprob: float = 0.0
