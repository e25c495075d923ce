"""Messages between the HTTP server and the engine process: msgspec structs, sent as msgpack.

The server tokenizes, detokenizes and finds stop strings; the engine handles token ids only. Reports, plans and knobs
travel as the JSON of their contract classes; the transport does not parse them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from specdecode_worker.sampling.params import Sampling

FinishReason = Literal["stop", "length", "abort", "error", "deadline", "queue_timeout"]
"""Reason for the end of a request. ``deadline`` and ``queue_timeout`` are cancellations by the engine."""


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """New request. Times are readings of CLOCK_MONOTONIC, which both processes share, in seconds."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    task: str = "other"
    arrival_seconds: float = 0.0
    cache_salt: str = ""
    """Part of the digests of the prompt's blocks: requests with different salts share no cached prefix."""
    deadline_seconds: float = 0.0
    """Time at which the engine cancels the request, waiting or running; 0 for none."""
    queue_deadline_seconds: float = 0.0
    """Time at which the engine cancels the request if it was never admitted to the batch; 0 for none."""
    client: str = ""
    """Name of the API key; empty without keys. Waiting requests of different clients take turns."""
    weight: float = 1.0
    """Weight of the client: its tokens are divided by it."""
    emitted: tuple[int, ...] | None = None
    """Output tokens of an earlier attempt, which this request continues as after a preemption; None if it is new.

    Arrival and latency of a continued request are not counted again. Its speculation counters begin at 0.
    """
    blocks_at: str = ""
    """Host and port of the worker that may still hold the cache blocks of the earlier attempt; empty for none."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End of a request before its last token. Its blocks are freed within one step; unknown ids are ignored."""

    request_id: str
    stopped: bool = False
    """True if the text is complete, because of a stop string; false if nobody waits for the rest."""


class SetPlan(msgspec.Struct, frozen=True, tag=True):
    """Call that sets the plan (contract.Plan as JSON, already validated). Answered by Done."""

    call_id: int
    plan_json: bytes


class SetDraft(msgspec.Struct, frozen=True, tag=True):
    """Call that starts to load a draft (contract.DraftConfig as JSON), which then replaces the draft of that name.

    An empty name means the default draft. Done is sent at once, with an error if the swap cannot be tried. The new
    draft takes over between two steps; until then, and if it cannot be loaded, the previous draft stays in use. The
    report shows both.
    """

    call_id: int
    draft_json: bytes
    name: str = ""
    expected_hash: str = ""
    """Hash that the loaded draft must have; empty for any."""


class SetSynthetic(msgspec.Struct, frozen=True, tag=True):
    """Call that sets or clears (JSON null) the synthetic knobs (contract.SyntheticKnobs). Answered by Done."""

    call_id: int
    knobs_json: bytes


class GetReport(msgspec.Struct, frozen=True, tag=True):
    """Call for the worker report. Answered by Done with a contract.Report as JSON."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Request to leave the engine loop after the running step."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one token, from the raw logits of the target.

    ``rank`` is the rank of ``token``, 1 for the most likely. ``top_tokens`` and ``top_logprobs`` are the most likely
    tokens, best first.
    """

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Tokens(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """New tokens of one request.

    ``finish`` is set in the last message of the request. ``drafts``, ``draft_tokens`` and ``accepted`` are totals of
    the request so far.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    """Log probabilities of each of ``tokens``, if the request has ``logprobs``."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """Log probabilities of the prompt from its second token on, sent with the first token if requested."""
    error: str = ""


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to a call. ``error`` is the reason of a refusal, after which nothing has changed; empty for success."""

    call_id: int
    body: bytes = b""
    error: str = ""


class Loaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Notice that the engine accepts requests, with the properties of the loaded models."""

    max_model_len: int
    target: str
    draft_hash: str
    draft_problem: str = ""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    """Number of token ids that the target has an embedding for; 0 if unknown."""
    kernel_class: str = ""
    """Device, instruction sets and libraries that decide how results are rounded, and the version of the noise."""


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """Last message of an engine process that ends with an error."""

    reason: str


ToEngine = Submit | Abort | SetPlan | SetDraft | SetSynthetic | GetReport | Shutdown
FromEngine = Tokens | Done | Loaded | Crashed
