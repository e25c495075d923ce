"""API key check of the public port. Probes and metrics need no key, as in vLLM."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from fastapi import Request

from specdecode_worker.server.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})


class ApiKeys:
    """Dependency of every public route that requires an API key. Without keys it accepts every request."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have a fixed length, so the time of a comparison does not reveal the length of a key.
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, request: Request) -> None:
        """Raise Unauthorized unless the path is open or the request has a valid key."""
        if not self._digests or request.scope["path"] in OPEN_PATHS:
            return
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        digest = _digest(sent.strip())
        # Compare all keys, so that the time does not depend on which key matches.
        fits = sum(hmac.compare_digest(digest, known) for known in self._digests)
        if scheme.lower() != "bearer" or not fits:
            raise Unauthorized("send a valid API key as 'Authorization: Bearer <key>'", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
