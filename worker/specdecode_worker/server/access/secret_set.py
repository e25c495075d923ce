"""Immutable set of named secrets: API keys by client name, or admin tokens by scope."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

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
