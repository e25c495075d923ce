"""What crosses between the HTTP server and the engine process: msgspec structs, msgpack on the wire.

The server tokenizes, detokenizes and finds stop strings; the engine knows token ids alone. Reports, plans and knobs
travel as the JSON of their contract classes, unread by the transport.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 cut nothing.
    Penalties are vLLM's: presence and frequency look at the answer, repetition at prompt and answer.

    ``seed`` is always set: the server draws one for requests that name none.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Until so many tokens are out, no stop token can be chosen."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None asks for none; else how many of the most likely tokens are told beside the chosen one."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt; a request that asks for them reuses no prefix."""


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A new request. ``arrival_seconds`` is CLOCK_MONOTONIC, which both processes share."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    task: str = "other"
    arrival_seconds: float = 0.0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget a request and free its blocks within one step. Unknown ids are ignored."""

    request_id: str


class SetPlan(msgspec.Struct, frozen=True, tag=True):
    """Take a plan (contract.Plan as JSON, already validated). Answered by Done."""

    call_id: int
    plan_json: bytes


class SetDraft(msgspec.Struct, frozen=True, tag=True):
    """Load another draft (contract.NamedDraft or DraftConfig as JSON) in place of the one of that name, the first if
    it has none, and let it take over between two steps. Answered by Done once it has; an error changes nothing."""

    call_id: int
    draft_json: bytes
    name: str = ""


class SetSynthetic(msgspec.Struct, frozen=True, tag=True):
    """Set or clear the synthetic knobs (contract.SyntheticKnobs as JSON). Answered by Done."""

    call_id: int
    knobs_json: bytes


class GetReport(msgspec.Struct, frozen=True, tag=True):
    """Answered by Done with the JSON of a contract.Report."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop once the running step is collected."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one emitted token, from the target's raw logits: its own, its rank (1 is the most likely), and the most
    likely ones beside it, best first."""

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Tokens(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """New tokens of one request; ``finish`` closes it. ``drafts`` and ``accepted`` are the request's sums so far."""

    request_id: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    """One for each of ``tokens`` where the request asked."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """With the first token, for the prompt's second token and all behind it, where the request asked."""
    error: str = ""


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to a call. ``error`` says why it was refused; nothing changed then."""

    call_id: int
    body: bytes = b""
    error: str = ""


class Loaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine is ready to take requests."""

    max_model_len: int
    target: str
    draft_hash: str
    draft_problem: str = ""
    eos_token_ids: tuple[int, ...] = ()


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """The engine's last words."""

    reason: str


ToEngine = Submit | Abort | SetPlan | SetDraft | SetSynthetic | GetReport | Shutdown
FromEngine = Tokens | Done | Loaded | Crashed
