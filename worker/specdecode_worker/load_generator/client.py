"""HTTP client of the load generator: sends one scheduled request and records its outcome."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import httpx
import msgspec

from specdecode_worker.load_generator.schedule import ClientBehaviour, ScheduledRequest

PIECES_BEFORE_DISCONNECT = 3
"""Number of text pieces after which a client of kind ``disconnect`` closes its stream."""


@dataclass(slots=True)
class Outcome:
    """Outcome of one request.

    ``problem`` describes a failure; empty for none. A response 429 sets ``rejected`` and is not a failure.
    """

    request: ScheduledRequest
    status: int = 0
    problem: str = ""
    rejected: bool = False
    ttft_seconds: float | None = None
    e2e_seconds: float = 0.0
    tokens: int = 0
    text_hash: str = ""


async def send_request(
    client: httpx.AsyncClient, model: str, prompt: str, request: ScheduledRequest, oversized_max_tokens: int
) -> Outcome:
    """Send one request and return its outcome. HTTP errors are recorded as its problem and not raised.

    Args:
        client: HTTP client with the base URL of the server.
        model: Name of the served model.
        prompt: User message.
        request: The scheduled request.
        oversized_max_tokens: A max_tokens that exceeds the context length, for requests of kind ``oversized``.
    """
    outcome = Outcome(request)
    began = time.monotonic()
    try:
        if request.kind in (ClientBehaviour.stream, ClientBehaviour.disconnect):
            await _stream(client, _body(model, prompt, request, oversized_max_tokens), outcome, began)
        else:
            await _whole(client, _body(model, prompt, request, oversized_max_tokens), outcome)
    except httpx.HTTPError as error:
        outcome.problem = f"{type(error).__name__}: {error}"
    outcome.e2e_seconds = time.monotonic() - began
    return outcome


def _body(model: str, prompt: str, request: ScheduledRequest, oversized_max_tokens: int) -> bytes:
    if request.kind is ClientBehaviour.garbage:
        return b'{"model": '
    fields = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": oversized_max_tokens if request.kind is ClientBehaviour.oversized else request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "stream": request.kind in (ClientBehaviour.stream, ClientBehaviour.disconnect),
    }
    if fields["stream"]:
        fields["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(fields)


async def _whole(client: httpx.AsyncClient, body: bytes, outcome: Outcome) -> None:
    answer = await client.post("/v1/chat/completions", content=body)
    if not _expected(outcome, answer.status_code, answer.text):
        return
    if answer.status_code == 200:
        completion = answer.json()
        outcome.tokens = completion["usage"]["completion_tokens"]
        outcome.text_hash = _hash(completion["choices"][0]["message"]["content"])


async def _stream(client: httpx.AsyncClient, body: bytes, outcome: Outcome, began: float) -> None:
    text, finished, pieces = "", False, 0
    async with client.stream("POST", "/v1/chat/completions", content=body) as answer:
        if answer.status_code != 200:
            _expected(outcome, answer.status_code, (await answer.aread()).decode())
            return
        outcome.status = 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                finished = finished or line == "data: [DONE]"
                continue
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in chunk:
                outcome.problem = f"the stream ended with an error: {chunk['error']['message']}"
                return
            outcome.tokens = (chunk.get("usage") or {}).get("completion_tokens", outcome.tokens)
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                pieces += bool(piece)
                text += piece
            if text and outcome.ttft_seconds is None:
                outcome.ttft_seconds = time.monotonic() - began
            if outcome.request.kind is ClientBehaviour.disconnect and pieces >= PIECES_BEFORE_DISCONNECT:
                return
    if not finished:
        outcome.problem = "the stream broke off before [DONE]"
    outcome.text_hash = _hash(text)


def _expected(outcome: Outcome, status: int, text: str) -> bool:
    """Record the status. Return whether it is expected for this kind of request; else record a problem."""
    outcome.status = status
    outcome.rejected = status == 429
    if status in ((400, 429) if outcome.request.kind.refused else (200, 429)):
        return True
    outcome.problem = f"{status}: {text[:200]}"
    return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
