"""Keyed hashes of users, and the keys by which the records of a user are found again.

The key is derived from the admin token with the scope operator, so that it is the same in all workers of a deployment.
A key is stored in the folder before the first record that needs it, and stays there until those records have expired.
A rotated token therefore prevents no deletion. Tokens cannot be computed from stored keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

KEY_SUFFIX = ".subject-key"
_KEY_BYTES = 32
_ID_DIGITS = 8
_PURPOSE = b"specdecode captured users"
_MARGIN_SECONDS = 86400.0
"""Time for which a key outlives the records: no request takes longer."""


def derived_key(token: str) -> bytes:
    """Return the key of a token."""
    return hmac.digest(token.encode(), _PURPOSE, hashlib.sha256)


def key_id(key: bytes) -> str:
    """Return the identifier of a key, which precedes every hash that was made with it."""
    return hashlib.sha256(key).hexdigest()[:_ID_DIGITS]


def keyed_hash(key: bytes, user: str) -> str:
    """Return the identifier of the key and 32 hex digits of the HMAC-SHA256 of a user's identifier."""
    return f"{key_id(key)}-{hmac.digest(key, _encoded(user), hashlib.sha256).hex()[:32]}"


def unkeyed_hash(user: str) -> str:
    """Return the hash that records of earlier versions have: those with a list of users can compute it."""
    return hashlib.sha256(b"user\0" + _encoded(user)).hexdigest()[:32]


def stored_keys(folder: Path) -> dict[str, bytes]:
    """Return the keys of a folder by their identifiers. Files that hold none are left out."""
    keys = {}
    for path in folder.glob(f"*{KEY_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):
            key = bytes.fromhex(path.read_text())
            if key_id(key) == path.name.removesuffix(KEY_SUFFIX):
                keys[key_id(key)] = key
    return keys


class UserHashes:
    """Hashes that records of one user may have."""

    def __init__(self, user: str, keys: Iterable[bytes]) -> None:
        known = list(keys)
        self.hashes = {unkeyed_hash(user), *(keyed_hash(key, user) for key in known)}
        self._ids = {key_id(key) for key in known}

    def matches(self, stored: str) -> bool:
        """Return whether a record with the hash ``stored`` is of this user."""
        return stored in self.hashes

    def is_undecidable(self, stored: str) -> bool:
        """Return whether a hash was made with a key that is not known. The record may be of this user."""
        identifier, dash, _ = stored.partition("-")
        return bool(dash) and identifier not in self._ids


class SubjectKeys:
    """Key of one worker's folder. Without a token the key is random.

    ``hash_of`` may be called from the event loop; the other methods block.
    """

    def __init__(self, folder: Path, read_token: Callable[[], str | None] = lambda: None) -> None:
        self._folder, self._read_token = folder, read_token
        token = read_token()
        self._key = derived_key(token) if token else secrets.token_bytes(_KEY_BYTES)
        self._used: dict[str, bytes] = {key_id(self._key): self._key}
        self._stored: set[str] = set()

    def hash_of(self, user: str | None) -> str:
        """Return the hash of a user; empty without one."""
        return keyed_hash(self._key, user) if user else ""

    def refresh(self) -> None:
        """Use the key of the current token, if the token was replaced."""
        token = self._read_token()
        if token and (key := derived_key(token)) != self._key:
            self._used[key_id(key)] = key
            self._key = key

    def store_for(self, stored_hash: str) -> None:
        """Store the key of a hash in the folder before a record with this hash is written. Raise OSError."""
        identifier, dash, _ = stored_hash.partition("-")
        if dash and identifier not in self._stored and identifier in self._used:
            _store(self._folder / f"{identifier}{KEY_SUFFIX}", self._used[identifier])
            self._stored.add(identifier)

    def known(self) -> Mapping[str, bytes]:
        """Return the keys of this worker and those of the folder, by identifier."""
        return {**stored_keys(self._folder), **self._used}

    def expire(self, max_age_seconds: float) -> None:
        """Delete keys that no stored record can need any more, and keep the current one."""
        current = self._folder / f"{key_id(self._key)}{KEY_SUFFIX}"
        with contextlib.suppress(OSError):
            os.utime(current)
        for path in self._folder.glob(f"*{KEY_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path != current and path.stat().st_mtime < time.time() - max_age_seconds - _MARGIN_SECONDS:
                    path.unlink()

    def forget_stored(self) -> None:
        """Store keys again before the next record: the folder was emptied."""
        self._stored.clear()


def _store(path: Path, key: bytes) -> None:
    """Write a key that only this user can read. Several workers may write the same one."""
    partial = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key.hex())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _encoded(user: str) -> bytes:
    return user.encode(errors="surrogatepass")
