"""The served model, admission control, and what a request asks for besides its text: sampling, limits, deadline."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from typing import Any, TypeVar

from starlette.datastructures import Headers

from specdecode_worker.contract import ServerConfig, ToolFormat, WorkerConfig
from specdecode_worker.core.messages import Loaded, Sampling
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.server.errors import BadRequest, TooManyWaiting
from specdecode_worker.server.requests import CompletionRequest, GenerationRequest
from specdecode_worker.server.tokenizer import Tokenizer
from specdecode_worker.server.tools import format_of
from specdecode_worker.version import VERSION

# Number of recent completions from which the completion rate is estimated.
_RECENT_COMPLETIONS = 64
# Upper bound of Retry-After.
_MAX_RETRY_AFTER_SECONDS = 60
# The first half of the places is for any client. In the other half a client keeps to its equal share, so that a client
# that floods the queue always leaves places to the others.
_UNSHARED_PART = 2
# Time since the last request after which a client without places counts as absent: longer than the pauses of a user
# between requests, so that its share is free when it returns.
_ACTIVE_SECONDS = 300.0


class AdmissionQueue:
    """Bounded queue of ``max_num_seqs`` running and ``max_waiting`` waiting generations.

    The caller passes the time, in seconds of one monotonic clock.
    """

    def __init__(self, max_num_seqs: int, max_waiting: int) -> None:
        self._capacity = max_num_seqs + max_waiting
        self._max_waiting = max_waiting
        self._completion_times: deque[float] = deque(maxlen=_RECENT_COMPLETIONS)
        self._places: Counter[str] = Counter()
        self._last_seen: dict[str, float] = {}

    @property
    def places(self) -> dict[str, int]:
        """Running and waiting generations of each client."""
        return dict(self._places)

    def record_start(self, client: str) -> None:
        """Record that a generation of ``client`` takes a place."""
        self._places[client] += 1

    def record_end(self, now: float, client: str = "") -> None:
        """Record that a generation of ``client`` ended at time ``now``, for whatever reason."""
        self._completion_times.append(now)
        self._places[client] -= 1
        if self._places[client] <= 0:
            del self._places[client]

    def check(self, in_flight: int, more: int, now: float, field: str, client: str = "") -> None:
        """Check that the queue has a place for ``more`` generations; ``in_flight`` is the current number.

        Once half of the places are taken, a client may hold at most its equal share of all places. This does not apply
        to a client that holds none, or if no other client is active.

        Raises:
            BadRequest: ``more`` exceeds the size of the queue; the error names ``field``.
            TooManyWaiting: The queue has no place for them now; the error has the Retry-After time.
        """
        self._last_seen[client] = now
        if more > self._capacity:
            raise BadRequest(f"a request may ask for at most {self._capacity} choices in total", param=field)
        if in_flight + more > self._capacity:
            raise TooManyWaiting(
                f"{self._max_waiting} requests are waiting already; try again later",
                retry_after_seconds=self.wait_seconds(in_flight + more - self._capacity, now),
            )

        share = self._capacity // self._count_active(now)
        held = self._places.get(client, 0)
        if in_flight + more > self._capacity // _UNSHARED_PART and held and held + more > share < self._capacity:
            raise TooManyWaiting(
                f"{held} requests of this API key are running or waiting already, and other keys are active; "
                "try again later",
                retry_after_seconds=self.wait_seconds(max(held + more - share, 1), now),
            )

    def _count_active(self, now: float) -> int:
        """Return the number of clients that hold places or were seen recently, and forget the others."""
        absent = [
            client
            for client, seen in self._last_seen.items()
            if client not in self._places and now - seen > _ACTIVE_SECONDS
        ]
        for client in absent:
            del self._last_seen[client]
        return len(self._last_seen)

    def wait_seconds(self, leaving: int, now: float) -> int:
        """Estimate the seconds until ``leaving`` generations have ended, at the rate of the recent completions.

        Returns:
            A value from 1 to 60; 1 with fewer than two recorded completions.
        """
        if len(self._completion_times) < 2:
            return 1
        # Measure until now and not until the last completion, so that a stalled queue gives a longer time.
        seconds_each = (now - self._completion_times[0]) / len(self._completion_times)
        return min(max(math.ceil(leaving * seconds_each), 1), _MAX_RETRY_AFTER_SECONDS)


# What a request asks for beside its text: sampling, limits, priority and deadline.

# Sampling parameters of a request: conversion for the engine, seeds of the choices, checks against the model.

MAX_LOGPROBS_PER_REQUEST = 1_000_000
"""Most log-probabilities that a request may ask for: choices x tokens x (log-probabilities per token + 1).

An answer holds up to 400 bytes for each of them while it is collected and encoded.
"""
# A request without max_tokens gets fewer tokens rather than an error, as long as this many are left.
_LEAST_DEFAULT_TOKENS = 4096
# Bias of the only allowed tokens: in fp32, exp(-200 + x) is 0 for differences x of logits up to 95, which models stay
# far below, and the tokens' own logits keep a precision of 2e-5.
_ALLOWED_BIAS = 200.0
_SEEDS = 2**63
# Increment of SplitMix64: 2**64 divided by the golden ratio, rounded to an odd number.
_GOLDEN = 0x9E3779B97F4A7C15


def seeds_of(seed: int | None, count: int) -> list[int]:
    """Return one seed for each of ``count`` choices; the first seed is random when ``seed`` is None.

    The first choice uses the seed of the request, so that a larger ``n`` does not change its text.
    """
    first = secrets.randbits(63) if seed is None else seed % _SEEDS
    return [first, *(_mixed(first + i * _GOLDEN) % _SEEDS for i in range(1, count))]


def _mixed(value: int) -> int:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014), so that adjacent seeds give independent streams."""
    value %= 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model: context length in tokens, and number of token ids that it has an embedding for."""

    max_model_len: int
    vocab_size: int
    unembedded: Mapping[int, str] = field(default_factory=dict, hash=False)
    """Tokens of the tokenizer that the model has no embedding for, by id."""


def check_ids(request: GenerationRequest, limits: ModelLimits) -> None:
    """Raise BadRequest if the stop tokens or the logit bias contain an id outside the vocabulary."""
    _check_tokens(request.stop_token_ids, "stop_token_ids", limits)
    _check_tokens(map(int, request.logit_bias), "logit_bias", limits)
    _check_tokens(request.allowed_token_ids or (), "allowed_token_ids", limits)


def token_limit(request: GenerationRequest, prompt: Sequence[int], limits: ModelLimits) -> int:
    """Return the maximum number of output tokens for ``prompt``.

    Raises:
        BadRequest: The prompt is empty, has ids outside the vocabulary, or exceeds the context length together with
            the requested output.
    """
    field = prompt_field(request)
    if not prompt:
        raise _bad("the prompt is empty", field)
    wanted = max(request.token_limit or 1, request.min_tokens, 1)
    if len(prompt) + wanted > limits.max_model_len:
        raise BadRequest(
            f"this model's maximum context length is {limits.max_model_len} tokens; the prompt has {len(prompt)} and "
            f"the answer may have {wanted}. Shorten the prompt or lower max_tokens",
            param=field,
            code="context_length_exceeded",
        )
    if not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
        _check_tokens(prompt, field, limits)
    # The engine emits at least one token; for max_tokens 0 (echo only) the client does not get it.
    return limits.max_model_len - len(prompt) if request.token_limit is None else max(request.token_limit, 1)


def truncated(request: GenerationRequest, prompt: list[int], limits: ModelLimits) -> list[int]:
    """Return the last tokens of a prompt that ``truncate_prompt_tokens`` keeps."""
    kept = request.truncate_prompt_tokens
    if kept == -1:
        kept = max(limits.max_model_len - max(request.token_limit or 1, request.min_tokens, 1), 1)
    return prompt if kept is None else prompt[-kept:]


def token_limits(request: GenerationRequest, prompts: Sequence[Sequence[int]], limits: ModelLimits) -> list[int]:
    """Return the maximum number of output tokens for each prompt, with the bound on all log-probabilities together.

    Raises:
        BadRequest: A prompt does not fit the model, or the request asks for more than MAX_LOGPROBS_PER_REQUEST.
    """
    wanted = [token_limit(request, prompt, limits) for prompt in prompts]
    count = request.top_logprobs_count
    if count is None:
        return wanted
    echoes = isinstance(request, CompletionRequest) and request.echo
    per_token = request.n * (count + 1)
    of_prompts = per_token * sum(map(len, prompts)) if echoes else 0
    total = of_prompts + per_token * sum(wanted)
    if total <= MAX_LOGPROBS_PER_REQUEST:
        return wanted
    fitting = (MAX_LOGPROBS_PER_REQUEST - of_prompts) // (per_token * len(prompts))
    if request.token_limit is None and fitting >= max(_LEAST_DEFAULT_TOKENS, request.min_tokens):
        return [min(one, fitting) for one in wanted]
    raise _bad(
        f"the request asks for up to {total} log-probabilities (choices x tokens x (log-probabilities per token + 1)), "
        f"and may ask for {MAX_LOGPROBS_PER_REQUEST}. Lower max_tokens, the number of choices or of log-probabilities, "
        "or send fewer prompts",
        "logprobs",
    )


def prompt_field(request: object) -> str:
    """Return the name of the field that has the prompt."""
    return "prompt" if isinstance(request, CompletionRequest) else "messages"


def _check_tokens(tokens: Iterable[int], field: str, limits: ModelLimits) -> None:
    """Raise BadRequest that names the first token outside the vocabulary."""
    for token in tokens:
        if token in limits.unembedded:
            raise _bad(
                f"{field}: the token {limits.unembedded[token]!r} ({token}) is in the tokenizer, but the model has no "
                f"embedding for it; its token ids lie in 0..{limits.vocab_size - 1}",
                field,
            )
        if not 0 <= token < limits.vocab_size:
            raise _bad(f"{field}: there is no token {token}; token ids must lie in 0..{limits.vocab_size - 1}", field)


_MADE_FIELDS = {"max_tokens", "seed", "top_k", "logit_bias", "stop_token_ids", "logprobs", "prompt_logprobs", "grammar"}
_COPIED_FIELDS = [
    name for name in Sampling.__struct_fields__ if name in GenerationRequest.model_fields and name not in _MADE_FIELDS
]
"""Fields of a body that are sampling parameters as they are."""


def sampling_of(request: GenerationRequest, limit: int, seed: int, limits: ModelLimits, grammar: str = "") -> Sampling:
    """Return the sampling parameters of one choice; ``limit`` is its maximum number of output tokens."""
    return Sampling(
        max_tokens=limit,
        seed=seed,
        top_k=request.top_k if 0 < request.top_k < limits.vocab_size else 0,
        logit_bias=(
            *((int(token), bias) for token, bias in request.logit_bias.items()),
            *((token, _ALLOWED_BIAS) for token in sorted(set(request.allowed_token_ids or ()))),
        ),
        stop_token_ids=tuple(request.stop_token_ids),
        logprobs=request.top_logprobs_count,
        prompt_logprobs=request.top_logprobs_count if isinstance(request, CompletionRequest) and request.echo else None,
        grammar=grammar,
        **{name: getattr(request, name) for name in _COPIED_FIELDS},
    )


def _bad(message: str, field: str) -> BadRequest:
    return BadRequest(message, param=field, code="invalid_value")


# Terms of one request besides its body: the client it is served for and its deadlines.

TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Client and deadlines of a request. Deadlines are times of the monotonic clock in seconds; 0 is none."""

    client: str = ""
    """Name of the API key; empty without keys."""
    weight: float = 1.0
    """Weight of the client's turns while requests wait."""
    deadline_seconds: float = 0.0
    queue_deadline_seconds: float = 0.0
    cache_salt: str = ""
    """Salt of the prefix cache that a router adds to the one of the body."""
    blocks_at: str = ""
    """Host and block port of the worker that a continued request comes from; empty for none."""


def terms_of(client: str, headers: Headers, config: ServerConfig, now: float) -> RequestTerms:
    """Return the terms of a request of ``client`` that arrived at time ``now``.

    Raises:
        BadRequest: The header X-Request-Timeout is no positive number of seconds.
    """
    timeout = read_timeout(headers.get(TIMEOUT_HEADER), config.request_timeout_seconds)
    return RequestTerms(
        client=client,
        deadline_seconds=now + timeout,
        queue_deadline_seconds=now + config.queue_timeout_seconds,
    )


def read_timeout(header: str | None, default_seconds: float) -> float:
    """Return the time limit of a request in seconds: that of the header, but at most ``default_seconds``.

    Raises:
        BadRequest: The header is no positive number.
    """
    if header is None:
        return default_seconds
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(
            f"{TIMEOUT_HEADER} must be a positive number of seconds", param=TIMEOUT_HEADER, code="invalid_value"
        )
    return min(seconds, default_seconds)


# The model that a worker serves, and the key of workers that can continue its streams.

# The served model as the HTTP server sees it: tokenizer, limits, fingerprint and tool call format.

Body = TypeVar("Body", bound=GenerationRequest)


@dataclass(frozen=True)
class Model:
    """Tokenizer and engine facts that are known once the model has loaded."""

    tokenizer: Tokenizer
    loaded: Loaded
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of sampling fields that a request leaves out, where they differ from those of the API."""

    @cached_property
    def limits(self) -> ModelLimits:
        """Context length and vocabulary size of the model."""
        # Tokenizer and embedding may have different sizes: fine-tunes add tokens, and published models pad embeddings.
        rows = self.loaded.vocab_size or self.tokenizer.vocab_size
        return ModelLimits(
            self.loaded.max_model_len, min(self.tokenizer.vocab_size, rows), self.tokenizer.tokens_from(rows)
        )

    @cached_property
    def fingerprint(self) -> str:
        """Value of `system_fingerprint`: it changes with the target's weights and with the program version only.

        The draft is not part of it, because speculation does not change the text.
        """
        return "fp_" + hashlib.sha256(f"{self.loaded.target} {VERSION}".encode()).hexdigest()[:10]

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Tool call format that the chat template asks for; None when the template takes no tools."""
        template = self.tokenizer.template
        return format_of(template.tool_source) if template is not None and template.takes_tools else None

    def with_defaults(self, body: Body) -> Body:
        """Return a request with the model's defaults in the sampling fields that it leaves out."""
        left_out = {name: value for name, value in self.sampling_defaults.items() if name not in body.model_fields_set}
        return body.model_copy(update=left_out) if left_out else body

    def grammar_compiler(self) -> GrammarCompiler:
        """Return a compiler that accepts the grammars that the engine accepts."""
        size = self.loaded.vocab_size or self.tokenizer.vocab_size
        return GrammarCompiler(lambda: self.tokenizer.json, size, self.loaded.eos_token_ids)


# Compatibility key: digest of everything that the text of a request depends on besides the request itself.
#
# A request that began on one worker continues on another one with the same text only if their keys are equal.

_KEY_DIGITS = 32


def compatibility_key(config: WorkerConfig, model: Model) -> str:
    """Return the key of a worker. Drafts are not part of it, because speculation does not change the text."""
    parts = {
        "weights": model.loaded.target,
        "tokenizer": model.tokenizer.digest,
        "end_tokens": model.loaded.eos_token_ids,
        "sampling": dict(model.sampling_defaults),
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "kv_cache_dtype": config.engine.kv_cache_dtype,
        "sampler": config.engine.sampler,
        "kernels": model.loaded.kernel_class,
        "tensor_parallel_size": config.engine.tensor_parallel_size,
        "grammars": metadata.version("llguidance"),
        "tool_call_parser": config.server.tool_call_parser,
        "reasoning_parser": config.server.reasoning_parser,
        "version": VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
