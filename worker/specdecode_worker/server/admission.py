"""API keys and admin tokens, admission control, and the headers and fields of a request besides its text."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers

from specdecode_worker.contract import Env, Route, ServerConfig, ToolFormat, WorkerConfig
from specdecode_worker.core.messages import Loaded
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.http_edge import (
    MAX_KEYS,
    Fingerprint,
    ReloadedFiles,
    UnusableFiles,
    checked_key,
    errors_naming,
    fingerprint_of,
    key_files,
    read_key_file,
    read_key_lines,
)
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.server.errors import BadRequest, CannotStart, TooManyWaiting, invalid_value
from specdecode_worker.server.requests import CompletionRequest, GenerationRequest
from specdecode_worker.server.tools import Tokenizer, format_of
from specdecode_worker.version import VERSION

log = logging.getLogger(__name__)

# Scopes of admin tokens, and the routes that each scope may call.


class Scope(StrEnum):
    """Purpose of an admin token. The file of a token has the name of its scope."""

    operator = "operator"
    """Every route except the reading of captured segments, also routes that a later version adds."""
    router = "router"
    """The routes below INTERNAL_PREFIX: internal streams, and the worker's load."""
    capture = "capture"
    """Reading of captured segments, and nothing else."""


INTERNAL_PREFIX = "/internal/"
"""Paths between a router and its workers."""


def scope_of(name: str) -> Scope:
    """Return the scope of the admin token ``name``: the part before a slash."""
    return Scope(name.partition("/")[0])


def allowed_scopes(method: str, path: str) -> frozenset[Scope]:
    """Return the scopes that may call a route of the admin port."""
    if path.startswith(INTERNAL_PREFIX):
        return frozenset({Scope.operator, Scope.router})
    if f"{path}/".startswith(f"{Route.captures}/") and (method, path) != ("POST", Route.capture_deletions):
        return frozenset({Scope.capture})
    return frozenset({Scope.operator})


# Immutable set of named secrets: API keys by client name, or admin tokens by scope.

# Digests are keyed with a secret of this process, so that the time of a lookup depends on nothing that a client knows.
_DIGEST_KEY = secrets.token_bytes(32)


class SecretSet:
    """Named secrets of which only digests are stored. Several names may have the same secret."""

    def __init__(self, secret_of: Mapping[str, str]) -> None:
        names: dict[bytes, list[str]] = {}
        for name in sorted(secret_of):
            names.setdefault(_digest(secret_of[name]), []).append(name)
        self._names = {digest: tuple(owners) for digest, owners in names.items()}

    def __len__(self) -> int:
        return len(self._names)

    def names_of(self, secret: str) -> tuple[str, ...]:
        """Return the names that have this secret, in alphabetical order; empty for an unknown secret."""
        return self._names.get(_digest(secret), ())


def bearer_token(authorization: str) -> str | None:
    """Return the token of an ``Authorization`` header; None without one, or for a scheme other than bearer."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _digest(secret: str) -> bytes:
    return hmac.digest(_DIGEST_KEY, secret.encode(errors="surrogatepass"), hashlib.sha256)


# Reading of secrets from files: a folder as the kubelet mounts a Secret, or a file with one secret a line.


def read_fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a folder or of a file, without reading a secret.

    Raises:
        UnusableFiles: The path cannot be examined.
    """
    with errors_naming(path):
        return fingerprint_of(key_files(path) if path.is_dir() else [path])


def read_secrets(path: Path, *, first_number: int = 1) -> dict[str, str]:
    """Read the secrets of a folder or of a file, one a line. The second one of a file in a folder is named ``FILE/2``.

    Args:
        path: Folder or file.
        first_number: Number in the name of the first secret without a name (``key-1``).

    Returns:
        The secrets by name, at least one.

    Raises:
        UnusableFiles: The path cannot be read, holds no secret or an invalid one.
    """
    with errors_naming(path):
        secrets = _read_folder(path) if path.is_dir() else _read_lines(path, first_number)
    if not secrets:
        raise UnusableFiles(f"{path} holds no key or token; write one, or leave the option out")
    if len(secrets) > MAX_KEYS:
        raise UnusableFiles(f"{path} holds {len(secrets)} keys; at most {MAX_KEYS} are supported")
    return secrets


def _read_folder(folder: Path) -> dict[str, str]:
    secrets = {}
    for file in key_files(folder):
        first, *others = read_key_file(file).strip().splitlines() or [""]
        secrets[file.name] = checked_key(first.strip(), str(file))
        for number, line in enumerate(others, 2):
            secrets[f"{file.name}/{number}"] = checked_key(line.strip(), f"{file} line {number}")
    return secrets


def _read_lines(path: Path, first_number: int) -> dict[str, str]:
    secrets: dict[str, str] = {}
    for name, key, place in read_key_lines(path, first_number):
        if name in secrets:
            raise UnusableFiles(f"{place}: the name {name} occurs twice")
        secrets[name] = key
    return secrets


# Admin token of a worker that was given none: made at start, and kept in a file that only its user can read.

_TOKEN_BYTES = 32


@contextlib.contextmanager
def token_file(token: str, port: int, environ: Mapping[str, str]) -> Iterator[Path]:
    """Write the token to ``admin-PORT.token`` in a folder of the user, and delete the file when the block ends.

    The folder is ``specdecode`` below $XDG_RUNTIME_DIR or the user's cache, else a new temporary one.

    Args:
        token: The token.
        port: Admin port, of which a machine has only one.
        environ: Environment variables of the process.

    Raises:
        CannotStart: No folder can be written.
    """
    file = _write_first(_folders(environ), f"admin-{port}.token", token)
    try:
        yield file
    finally:
        # Another worker may have taken the port, and written its own token, since this one stopped to listen.
        with contextlib.suppress(OSError):
            if file.read_text().strip() == token:
                file.unlink()


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "specdecode"
    yield default_cache_dir().parent
    with contextlib.suppress(OSError):
        yield Path(tempfile.mkdtemp(prefix="specdecode-"))


def _write_first(folders: Iterator[Path], name: str, token: str) -> Path:
    """Write the token into the first folder that takes it."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkstemp creates a file that only its owner can read. The rename replaces what a crashed worker left.
            handle, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
            with os.fdopen(handle, "w") as opened:
                opened.write(token + "\n")
            os.replace(temporary, folder / name)
            return folder / name
    raise CannotStart("cannot write the admin token to any folder; set SPECDECODE_ADMIN_TOKEN")


# Salt of a request's cached prefix: requests with different salts share no blocks of the prefix cache.


def prefix_salt(client: str, cache_salt: str, *, shared: bool, router_salt: str = "") -> str:
    """Return the salt of a request; empty if it shares blocks with every request that has none.

    The salt is the same in every worker, so that a router can send a client to the worker that has its prefix.

    Args:
        client: Name of the request's API key; empty without keys.
        cache_salt: Field ``cache_salt`` of the request; empty if it has none.
        shared: True if clients share the prefix cache, as far as ``cache_salt`` does not separate them.
        router_salt: Salt that a router adds for its client; empty if it adds none.
    """
    parts = ["" if shared else client, cache_salt, *([router_salt] if router_salt and not shared else [])]
    if not any(parts):
        return ""
    # JSON keeps the parts apart, so that no combination of values has the salt of another one.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


# Secrets that are read again when their files change, by a thread of their own.
#
# A thread, because a file system that hangs must not stop the event loop, nor wait behind its other blocking calls.

CHECK_SECONDS = 1.0
"""Time between two examinations of the files."""


class ReloadedSecrets(ReloadedFiles[SecretSet]):
    """Fixed secrets together with those of a path. ``current`` is replaced as a whole when the path changes."""

    def __init__(
        self,
        what: str,
        fixed: Mapping[str, str],
        read: Callable[[], Mapping[str, str]] = dict,
        fingerprint: Callable[[], Fingerprint] = tuple,
    ) -> None:
        """Read the secrets for the first time.

        Args:
            what: Name of the option that holds the path, for the log.
            fixed: Secrets by name that never change.
            read: Reads the secrets of the path. Without a path there are none.
            fingerprint: Examines the path without reading secrets.

        Raises:
            UnusableFiles: The path has no usable secrets.
        """
        super().__init__(
            what,
            lambda: SecretSet({**read(), **fixed}),
            fingerprint,
            summary=lambda current: f", {len(current)} are in use",
        )


@contextlib.contextmanager
def watching(sources: Sequence[ReloadedSecrets]) -> Iterator[None]:
    """Read changed secrets again, every CHECK_SECONDS, while the block runs."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(CHECK_SECONDS):
            for source in sources:
                try:
                    source.refresh()
                except Exception:
                    log.exception("cannot read secrets again; the last good ones stay in use")

    threading.Thread(target=watch, name="secrets", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


# Credentials of a worker: API keys and admin tokens from flags, environment and files.


@dataclass(frozen=True)
class Credentials:
    """API keys and admin tokens of a worker.

    ``generated_token`` is the admin token that was made because none was given; empty otherwise.
    """

    api_keys: ReloadedSecrets | None
    """None admits every client to the public port."""
    admin_tokens: ReloadedSecrets
    generated_token: str = ""

    @contextlib.contextmanager
    def in_use(self, admin_port: int, environ: Mapping[str, str]) -> Iterator[None]:
        """Read changed files again, and keep a generated token in its file, while the block runs.

        Raises:
            CannotStart: The file of a generated token cannot be written.
        """
        sources = [self.admin_tokens, *([self.api_keys] if self.api_keys else [])]
        with contextlib.ExitStack() as stack:
            if self.generated_token:
                file = stack.enter_context(token_file(self.generated_token, admin_port, environ))
                log.info("admin token: made for this run; it is in %s", file)
            stack.enter_context(watching(sources))
            yield


def load_credentials(config: ServerConfig, environ: Mapping[str, str], flag_keys: Sequence[str] = ()) -> Credentials:
    """Read all credentials for the first time.

    Args:
        config: Has the paths of keys and tokens.
        environ: Environment variables of the process.
        flag_keys: Keys of the flag --api-key.

    Raises:
        CannotStart: A variable or flag of keys or tokens is given and holds none.
        UnusableFiles: A path of keys or tokens is given and holds none, or cannot be read.
    """
    api_keys = _api_keys(config, _fixed_keys(environ, flag_keys))
    given = _environment_token(environ)
    generated = "" if given or config.admin_tokens_path else secrets.token_urlsafe(_TOKEN_BYTES)
    return Credentials(api_keys, _admin_tokens(config, given or generated), generated)


def _fixed_keys(environ: Mapping[str, str], flag_keys: Sequence[str]) -> dict[str, str]:
    """Return the keys of environment and flag, named key-1, key-2 and so on."""
    words = environ.get(Env.api_keys, "").split()
    if Env.api_keys in environ and not words:
        raise CannotStart(f"${Env.api_keys} is set and holds no key; set a key, or unset it to serve every client")
    if not all(key.strip() for key in flag_keys):
        raise CannotStart("--api-key holds no key; give a key, or leave the flag out to serve every client")
    return {f"key-{number}": key.strip() for number, key in enumerate((*words, *flag_keys), 1)}


def _api_keys(config: ServerConfig, fixed: Mapping[str, str]) -> ReloadedSecrets | None:
    if config.api_keys_path is None:
        return ReloadedSecrets("API keys", fixed) if fixed else None
    path = Path(config.api_keys_path)

    def read() -> dict[str, str]:
        keys = read_secrets(path, first_number=len(fixed) + 1)
        if taken := sorted(keys.keys() & fixed.keys()):
            raise UnusableFiles(f"{path}: the name {taken[0]} is that of a key of the command line or environment")
        return keys

    return ReloadedSecrets("API keys", fixed, read, partial(read_fingerprint, path))


def _environment_token(environ: Mapping[str, str]) -> str:
    """Return the operator's token of the environment; empty without one."""
    token = environ.get(Env.admin_token)
    if token is not None and not token.strip():
        raise CannotStart(f"${Env.admin_token} is set and holds no token; set one, or unset it to have one made")
    return (token or "").strip()


def _admin_tokens(config: ServerConfig, operator: str) -> ReloadedSecrets:
    """Return the admin tokens by scope: those of the folder, and another one of the operator unless it is empty."""
    named = {f"{Scope.operator}/environment": operator} if operator else {}
    if config.admin_tokens_path is None:
        return ReloadedSecrets("admin tokens", named)
    path = Path(config.admin_tokens_path)

    def read() -> dict[str, str]:
        if not path.is_dir():
            raise UnusableFiles(f"{path} is no folder; it must be one, with files named {', '.join(Scope)}")
        tokens = read_secrets(path)
        known = {name: token for name, token in tokens.items() if name.partition("/")[0] in set(Scope)}
        if unknown := sorted(tokens.keys() - known.keys()):
            log.warning("%s: %s is ignored; a token is in a file named %s", path, unknown[0], ", ".join(Scope))
        if not known:
            raise UnusableFiles(f"{path} holds no token; it needs a file named {', '.join(Scope)}")
        return known

    return ReloadedSecrets("admin tokens", named, read, partial(read_fingerprint, path))


# The served model, admission control, and what a request asks for besides its text: sampling, limits, deadline.

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
        self._last_seen = {
            client: seen
            for client, seen in self._last_seen.items()
            if client in self._places or now - seen <= _ACTIVE_SECONDS
        }
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


# What a request asks for besides its text: sampling, limits and deadline.

# Sampling parameters of a request: conversion for the engine, seeds of the choices, checks against the model.

MAX_LOGPROBS_PER_REQUEST = 1_000_000
"""Most log-probabilities that a request may ask for: choices x tokens x (log-probabilities per token + 1).

An answer holds up to 400 bytes for each of them while it is collected and encoded. The body of a chat has about 70 for
each, and behind a router at most ``internal_stream.MAX_BODY_BYTES`` in all.
"""
# A request without max_tokens gets fewer tokens rather than an error, as long as this many are left.
_LEAST_DEFAULT_TOKENS = 4096
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
    end_tokens: tuple[int, ...] = ()
    """Tokens that end an answer."""


def check_ids(request: GenerationRequest, limits: ModelLimits) -> None:
    """Raise BadRequest for token ids outside the vocabulary, and if no allowed token can be chosen at first."""
    _check_tokens(request.stop_token_ids, "stop_token_ids", limits)
    _check_tokens(map(int, request.logit_bias), "logit_bias", limits)
    allowed = set(request.allowed_token_ids or ())
    _check_tokens(allowed, "allowed_token_ids", limits)
    if request.min_tokens and allowed and allowed <= {*request.stop_token_ids, *limits.end_tokens}:
        raise invalid_value(
            "allowed_token_ids has nothing but tokens that end the answer, before which min_tokens asks for others; "
            "allow another token, or leave min_tokens out",
            "allowed_token_ids",
        )


def token_limit(request: GenerationRequest, prompt: Sequence[int], limits: ModelLimits) -> int:
    """Return the maximum number of output tokens for ``prompt``.

    Raises:
        BadRequest: The prompt is empty, has ids outside the vocabulary, or exceeds the context length together with
            the requested output.
    """
    field = "prompt" if isinstance(request, CompletionRequest) else "messages"
    if not prompt:
        raise invalid_value("the prompt is empty", field)
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
    raise invalid_value(
        f"the request asks for up to {total} log-probabilities (choices x tokens x (log-probabilities per token + 1)), "
        f"and may ask for {MAX_LOGPROBS_PER_REQUEST}. Lower max_tokens, the number of choices or of log-probabilities, "
        "or send fewer prompts",
        "logprobs",
    )


def _check_tokens(tokens: Iterable[int], field: str, limits: ModelLimits) -> None:
    """Raise BadRequest that names the first token outside the vocabulary."""
    for token in tokens:
        if token in limits.unembedded:
            raise invalid_value(
                f"{field}: the token {limits.unembedded[token]!r} ({token}) is in the tokenizer, but the model has no "
                f"embedding for it; its token ids lie in 0..{limits.vocab_size - 1}",
                field,
            )
        if not 0 <= token < limits.vocab_size:
            raise invalid_value(
                f"{field}: there is no token {token}; token ids must lie in 0..{limits.vocab_size - 1}", field
            )


_MADE_FIELDS = {
    "max_tokens", "seed", "top_k", "logit_bias", "allowed_token_ids", "stop_token_ids", "logprobs", "prompt_logprobs",
    "grammar",
}  # fmt: skip
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
        logit_bias=tuple((int(token), bias) for token, bias in request.logit_bias.items()),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids or ()))),
        stop_token_ids=tuple(request.stop_token_ids),
        logprobs=request.top_logprobs_count,
        prompt_logprobs=request.top_logprobs_count if isinstance(request, CompletionRequest) and request.echo else None,
        grammar=grammar,
        **{name: getattr(request, name) for name in _COPIED_FIELDS},
    )


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
        raise invalid_value(f"{TIMEOUT_HEADER} must be a positive number of seconds", TIMEOUT_HEADER)
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
            self.loaded.max_model_len,
            min(self.tokenizer.vocab_size, rows),
            self.tokenizer.tokens_from(rows),
            self.loaded.eos_token_ids,
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
