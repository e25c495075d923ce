"""Internal stream: the answer to one request, sent by a worker to a router frame by frame; and a worker's load.

A router posts an ``OpenStream`` as msgpack to ``INTERNAL_STREAMS`` on the admin port of a worker, with a token of the
scope router. The answer is a sequence of frames: four bytes with the length (unsigned, big-endian), then one message
as msgpack. ``Open`` comes first unless the request is refused, but for an ``Alive`` while the request is prepared;
``Moved``, ``Error`` or ``End`` is the last frame. A connection that ends without one of these three has failed.

Text depends on prompt, seed, sampling parameters and weights alone. A router that has the ``Open`` and the token ids
of all steps so far can therefore continue the request on another worker with the same compatibility key: it sends them
as ``resume``, and writes a ``Step`` to its client only if the index of the step is the next one of that choice.

This module needs msgspec, which the rest of the contract does not.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

INTERNAL_STREAMS = "/internal/v1/streams"
"""Path of internal streams on the admin port."""
WORKER_LOAD = "/internal/v1/load"
"""Path of a worker's ``WorkerLoad`` on the admin port, as msgpack."""
ROUTER_HEADER = "X-Specdecode-Router"
"""Name of the router that asks for a ``WorkerLoad``. The worker counts it among its routers from then on."""
CONTENT_TYPE = "application/vnd.specdecode.frames"
ALIVE_SECONDS = 0.25
"""Interval of ``Alive`` frames."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest frame."""
MAX_BODY_BYTES = MAX_FRAME_BYTES - 1024
"""Largest body of an ``End``, beside its other fields. One with most of a million log-probabilities exceeds it."""
_LENGTH_BYTES = 4

Logprobs = tuple[float, int, tuple[int, ...], tuple[float, ...]]
"""Log-probabilities of one token: its own, its rank, the most likely tokens, and their log-probabilities."""


class ChoiceStart(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a request, with everything that its tokens depend on.

    ``sampling`` is the worker's ``sampling.params.Sampling`` as msgpack: seed and ``max_tokens`` as capped are in
    it. Routers pass it back unread.
    """

    prompt: int
    """Index of its prompt in ``Open.prompts``."""
    sampling: bytes


class Open(msgspec.Struct, frozen=True, tag="open", kw_only=True):
    """First frame: the request as the worker understood it."""

    compatibility_key: str
    """Digest of everything that the text depends on besides the request. Only a worker with an equal key continues."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt; one prompt for a chat."""
    choices: tuple[ChoiceStart, ...]
    """Choices in the order of their index in the response."""
    created: int
    """Unix time of the response in seconds."""
    stream: bool
    """True if the client gets server-sent events, false if it gets one body at the end."""
    opening: bytes = b""
    """Events to send with the first step, also if that has none, so that clients measure the time to the first token.

    They are part of no step, so a resumed request does not repeat them.
    """
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of the response to the client."""


class ChoiceCounters(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one choice so far, over all attempts."""

    cached_tokens: int = 0
    draft_tokens: int = 0
    acceptance: tuple[int, ...] = ()
    """Number of steps with a draft by the number of draft tokens that they accepted, from 0."""


class Step(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """New tokens of one choice, at least one."""

    choice: int
    index: int
    """Index of the first of ``ids`` in the output of the choice, from 0."""
    ids: tuple[int, ...]
    counters: ChoiceCounters
    logprobs: tuple[Logprobs, ...] = ()
    """Log-probabilities of each of ``ids``, where the engine computes them."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """Log-probabilities of the prompt from its second token on, in the first step, if the request asks for them."""
    events: bytes = b""
    """Server-sent events for the client; empty while text is held back, and for requests that are not streamed."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sign of life every ``ALIVE_SECONDS`` while the engine process beats. It is not sent while that process hangs.

    A router suspects a worker whose frames stop.
    """

    step: int
    """Number of the engine's last step."""
    longest_step_seconds: float = 0.0
    """Longest step so far. An engine that is inside of a step for longer may hang."""


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """Last frame of a worker that drains: continue on another worker at once."""

    block_port: int = 0
    """Port from which the other worker gets the cache blocks of the request, for as long as this one lives; or 0."""


class Error(msgspec.Struct, frozen=True, tag="error", kw_only=True):
    """Last frame of a request that failed or was refused."""

    status: int
    """HTTP status for a client that has not received anything yet."""
    body: bytes
    """OpenAI's error object as JSON."""
    headers: tuple[tuple[str, str], ...] = ()
    retryable: bool = False
    """True if another worker may answer: this one is full, loading, draining, or its engine is gone."""


class End(msgspec.Struct, frozen=True, tag="end", kw_only=True):
    """Last frame of a request that is complete."""

    body: bytes
    """Last events of a stream (usage where asked for, and ``[DONE]``), or the whole JSON body."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


Frame = Open | Step | Alive | Moved | Error | End


class ChoiceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one choice so far, as the router's journal has it. ``logprobs`` are those of its steps."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    counters: ChoiceCounters = ChoiceCounters()


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """Continuation of a request: the ``Open`` of its first attempt, and the progress of every choice in order."""

    open: Open
    choices: tuple[ChoiceProgress, ...]


class OpenStream(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a router for an internal stream.

    Times are durations, because the clocks of two pods differ.
    """

    route: str
    """Public path, for example ``/v1/chat/completions``."""
    body: bytes
    """Body of the client, unchanged."""
    request_id: str
    """Id of the response, and of the tool calls in it. It stays the same in every attempt."""
    task: str | None = None
    """Value of the client's header X-Specdecode-Task."""
    capture: str | None = None
    """Value of the client's header that permits or forbids capture."""
    timeout_seconds: float | None = None
    """Time that is left until the deadline of the request; None for the worker's own limit."""
    tenant: str = ""
    """Name of the client, as the router authenticated it. Waiting requests of different tenants take turns."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Weight of the tenant's turns. The worker orders waiting requests by it as the routers do."""
    cache_salt: str = ""
    """Salt of the prefix cache, in addition to the body's: requests with different salts share no cached prefix."""
    resume: Resume | None = None
    blocks_at: str = ""
    """Host and block port of the worker that ``resume`` comes from, if that one moved the request."""
    seed: int | None = None
    """Seed for a body that has none; None for a random one."""
    created: int | None = None
    """Unix time of the response; None for the time at which the worker gets the request."""
    delivered: tuple[int, ...] | None = None
    """Output tokens of each choice whose events the client has from an earlier connection; None if it has none.

    The steps up to there have no events. The worker generates their tokens again, unless ``resume`` has them.
    """


class PlanTask(msgspec.Struct, frozen=True, array_like=True):
    """Task of a worker's plan."""

    name: str
    match: str | None = None
    """Text in the prompt of requests that belong to the task."""
    draft: str = ""
    """Name of its own draft, if the worker has loaded it; empty for the first draft."""
    clients: tuple[str, ...] = ()
    """Names of the tenants whose requests belong to the task."""


class StepKindTime(msgspec.Struct, frozen=True, array_like=True):
    """Number and seconds of the steps of one kind since the worker's start: a ``StepCell`` without its moments."""

    tokens_bucket: int
    draft_passes: int
    prefill: bool
    context_bucket: int
    count: int
    seconds: float


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a worker, which routers read every few seconds, and the names of its routers."""

    routers: tuple[str, ...]
    """Names of the routers that asked lately, in order. They share the worker's places."""
    settled: bool
    """False while the worker is new, so that not every router has asked yet."""
    clients: dict[str, int]
    """Sequences of each client, running and waiting. Their sum is the load of the worker."""
    max_num_seqs: int
    draining: bool
    compatibility_key: str
    model: str
    tasks: tuple[PlanTask, ...] = ()
    steps: tuple[StepKindTime, ...] = ()


class FrameReader:
    """Splits the bytes of a stream into frames. Raises ValueError for bytes that are no frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Frame)

    def push(self, data: bytes) -> list[Frame]:
        """Add received bytes and return the frames that are complete now."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
            end = start + _LENGTH_BYTES + length
            if len(buffer) < end:
                break
            try:
                frames.append(self._decoder.decode(memoryview(buffer)[start + _LENGTH_BYTES : end]))
            except msgspec.MsgspecError as error:
                raise ValueError(f"the bytes are no frame: {error}") from None
            start = end
        del buffer[:start]
        return frames


Document = TypeVar("Document", OpenStream, WorkerLoad)
_encoder = msgspec.msgpack.Encoder()


def encode_frame(frame: Frame) -> bytes:
    """Return a frame as bytes, with its length before it."""
    message = _encoder.encode(frame)
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


def encode_document(document: OpenStream | WorkerLoad) -> bytes:
    """Return a request as the body of its POST, or a load as the body of its answer."""
    return _encoder.encode(document)


def decode_document(kind: type[Document], body: bytes) -> Document:
    """Return the document in a body. Raises ValueError if it is none."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the body is no {kind.__name__}: {error}") from None
