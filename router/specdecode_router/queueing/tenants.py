"""Tenants: the clients of the router, authenticated by API keys that are read again when their files change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from specdecode_router.errors import ApiError
from specdecode_router.queueing.tenant_files import TenantSettings, read_fingerprint, read_keys, read_settings
from specdecode_worker.http_edge import ReloadedFiles

# Digests are keyed with a secret of this process, so that the time of a lookup depends on nothing that a client knows.
_DIGEST_KEY = secrets.token_bytes(32)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Client of the router."""

    name: str
    """Name of its API key; empty where clients are not authenticated."""
    weight: float = 1.0
    """Share of the places, relative to the other tenants, while requests are waiting."""
    priority: int = 0
    """Priority of its requests: up to 0 interactive, above 0 batch."""
    max_in_flight: int | None = None
    """Most places at the same time; None for no limit."""


class TenantTable(ReloadedFiles[dict[bytes, Tenant]]):
    """Tenants by digest of their API keys. The table is replaced as a whole when a file changes."""

    def __init__(self, path: Path | None) -> None:
        """Read the files for the first time.

        Args:
            path: Folder with one file of keys for each tenant, as a Secret is mounted, and optionally ``tenants.json``;
                or a file with one ``name=key`` or ``key`` a line. Without a path every client is ``Tenant("")``.

        Raises:
            UnusableFiles: The files cannot be used; the message says what to change.
        """
        self._path = path
        super().__init__(
            "tenants",
            self._tenants,
            lambda: read_fingerprint(path) if path else (),
            stays="the last good table stays in use",
            summary=lambda tenants: f", {len(tenants)} keys are in use",
        )

    def authenticate(self, authorization_header: str) -> Tenant:
        """Return the tenant of a request.

        Args:
            authorization_header: Value of the header ``Authorization``; empty without one.

        Raises:
            ApiError: 401, the key is missing or not known.
        """
        if self._path is None:
            return Tenant("")
        scheme, _, key = authorization_header.partition(" ")
        tenant = self.current.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            message = "send a valid API key as 'Authorization: Bearer <key>'"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
        return tenant

    def _tenants(self) -> dict[bytes, Tenant]:
        """Return the tenants by digest of their keys. A key of several tenants is that of the first by name."""
        if self._path is None:
            return {}
        keys, settings = read_keys(self._path), read_settings(self._path)
        if unknown := sorted(settings.keys() - keys.keys()):
            log.warning("tenants: tenants.json has settings of %s, which has no key", unknown[0])
        tenants: dict[bytes, Tenant] = {}
        for name in sorted(keys):
            own = settings.get(name, TenantSettings())
            tenant = Tenant(name, own.weight, own.priority, own.max_in_flight)
            for key in keys[name]:
                tenants.setdefault(_digest(key), tenant)
        return tenants


def _digest(key: str) -> bytes:
    return hmac.digest(_DIGEST_KEY, key.encode(errors="surrogatepass"), hashlib.sha256)
