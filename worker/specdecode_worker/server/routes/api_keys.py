"""API keys of the public port: who knows one of them is let in. Probes and metrics stay open, as in vLLM."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from fastapi import Request

from specdecode_worker.server.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})


class ApiKeys:
    """A dependency of every route. Without keys everyone is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that a comparison tells nothing about how long a key is.
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, request: Request) -> None:
        """Raises Unauthorized."""
        if not self._digests or request.url.path in OPEN_PATHS:
            return
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        digest = _digest(sent.strip())
        # Every key is compared, whichever fits.
        fits = sum(hmac.compare_digest(digest, known) for known in self._digests)
        if scheme.lower() != "bearer" or not fits:
            raise Unauthorized("send a valid API key as 'Authorization: Bearer <key>'", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
