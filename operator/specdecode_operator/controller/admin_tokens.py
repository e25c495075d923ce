"""Tokens of the workers' admin ports, derived from one key, so that the operator reads no Secret of a user's namespace.

The key is a Secret in the operator's own namespace. A deployment's tokens are written into a Secret that its workers
mount; workers read it again when it changes. If the Secret is deleted, the operator writes the same tokens again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specdecode_operator import manifests
from specdecode_operator.errors import ClusterError, Conflict, Refused
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import SECRETS
from specdecode_operator.types import Deployment, Key

KEY_SECRET = "specdecode-operator-token-key"
"""Name of the Secret with the key."""
ENSURE_SECONDS = 10.0
"""Least time between two attempts to create the Secret of a deployment whose pods do not start, in seconds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """Keys of the token derivation: the current one, and the previous one during a rotation."""

    current: bytes
    previous: bytes | None = None

    def tokens(self, deployment: Key, scope: str) -> tuple[str, ...]:
        """Return the tokens of one deployment and scope, the current one first."""
        return tuple(derive_token(key, deployment, scope) for key in (self.current, self.previous) if key)


def derive_token(key: bytes, deployment: Key, scope: str) -> str:
    """Derive the token of one deployment and scope by HMAC-SHA256.

    The token depends on the name and not on the uid. If a deployment is deleted without its workers and created again,
    the workers still have the tokens of the first one. Who once read them keeps them, until the key is replaced.
    """
    digest = hmac.new(key, "/".join((scope, *deployment)).encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


async def load_keys(client: KubeClient, namespace: str) -> TokenKeys:
    """Read the keys, and create their Secret if there is none.

    Raises:
        ClusterError: The Secret cannot be read or created, or has no key ``current``.
    """
    secret = await client.get(SECRETS, namespace, KEY_SECRET)
    if secret is None:
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {"name": KEY_SECRET, "namespace": namespace},
            "stringData": {"current": secrets.token_urlsafe(32)},
        }
        try:
            secret = await client.create(SECRETS, manifest)
        except Conflict:
            secret = await client.get(SECRETS, namespace, KEY_SECRET)
    data: Mapping[str, str] = (secret or {}).get("data") or {}
    if not data.get("current"):
        raise ClusterError(f"Secret {namespace}/{KEY_SECRET} has no key 'current'; delete it to have it created again")
    previous = data.get("previous")
    return TokenKeys(base64.b64decode(data["current"]), base64.b64decode(previous) if previous else None)


class AdminTokens:
    """Tokens of all deployments, and the Secrets that hand them to workers."""

    def __init__(self, client: KubeClient, keys: TokenKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._keys = keys
        self._clock = clock
        self._ensured: dict[str, float] = {}
        """Time of the last attempt to create the Secret, by uid of the deployment."""
        self._suspected: set[str] = set()
        """Uids of deployments whose Secret may be missing."""

    def tokens(self, key: Key) -> tuple[str, ...]:
        """Return the operator's tokens for a deployment, the current one first."""
        return self._keys.tokens(key, "operator")

    async def ensure(self, deployment: Deployment, *, suspicious: bool, mounted: bool = False) -> None:
        """Create the Secret of a deployment if it may be missing: once after each start, then on suspicion.

        A rotation of the key deletes the Secret while all pods run. Only a create finds out: the Secret cannot be read.

        Args:
            deployment: The deployment.
            suspicious: True if a pod does not start, for which a missing Secret may be the reason.
            mounted: True if pods run that have mounted the Secret. Then a refusal, as of a full quota, is no problem.

        Raises:
            ClusterError: The API server refused the Secret.
        """
        last = self._ensured.get(deployment.uid)
        suspicious = suspicious or deployment.uid in self._suspected
        if last is not None and (not suspicious or self._clock() - last < ENSURE_SECONDS):
            return
        tokens = {str(scope): self._keys.tokens(deployment.key, scope) for scope in manifests.TokenScope}
        try:
            await self._client.create(SECRETS, manifests.tokens_secret(deployment, tokens))
            log.info("%s/%s: created the Secret of its admin tokens", *deployment.key)
        except Conflict:
            pass  # The Secret exists. If another client made it, workers answer 401 and their reports are missing.
        except Refused:
            if suspicious or not mounted:
                raise
        self._ensured[deployment.uid] = self._clock()
        self._suspected.discard(deployment.uid)

    def suspect(self, uid: str) -> None:
        """Mark the Secret of a deployment as possibly missing, because a worker accepts none of the tokens."""
        self._suspected.add(uid)

    def forget(self, uid: str) -> None:
        """Drop the records of a deleted deployment."""
        self._ensured.pop(uid, None)
        self._suspected.discard(uid)
