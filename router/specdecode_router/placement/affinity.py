"""Affinity of a request: requests with an equal affinity share a prefix and should meet the same worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

PART_CHARACTERS = 1024
"""Characters that are hashed of the system message, and of the first user turn.

Each has a bound of its own: behind a long system prompt that many conversations share, the user turn still separates
them. A few hundred tokens identify a conversation, and prompts of 200 KB cost no more than short ones.
"""
PART_TOKENS = 256
"""Token ids that are hashed of a prompt that is given as token ids."""
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Affinity:
    """Values that the rendezvous hash is made of."""

    salt: str
    """Tenant and cache salt: requests with different salts share no cached prefix, so they need not meet."""
    task: str
    prefix: bytes
    """Digest of the first characters of the conversation."""

    @property
    def key(self) -> bytes:
        """Digest of all values."""
        return _digest([self.salt, self.task, self.prefix.hex()])


def affinity_of(route: str, body: Mapping[str, Any], *, tenant: str, task: str | None) -> Affinity:
    """Return the affinity of a request. It never raises: a body of another form counts as an empty conversation.

    Args:
        route: Public path, for example ``/v1/chat/completions``.
        body: JSON body of the request, not validated yet.
        tenant: Name of the client.
        task: Task of the request; None without one.
    """
    parts = list(_chat_parts(body)) if "messages" in body else [_prompt_part(body.get("prompt", body.get("input")))]
    cache_salt = body.get("cache_salt")
    salt = json.dumps([tenant, cache_salt if isinstance(cache_salt, str) else ""])
    # Routes have different templates around the same text, so their prefixes differ.
    return Affinity(salt, task or "", _digest([route, _beginning(body.get("model")), *parts]))


def _chat_parts(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the system messages before the first user turn, and that turn."""
    messages = body["messages"]
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            return
        role = _beginning(message.get("role"))
        yield f"{role}:{_text(message.get('content'))}"
        if role not in _SYSTEM_ROLES:
            return


def _beginning(value: Any) -> str:
    """Return the first characters of a text. Other values count as none: they may be nested too deep to be written."""
    return value[:PART_CHARACTERS] if isinstance(value, str) else ""


def _text(content: Any) -> str:
    """Return the first characters of a message, whose content is a text or a list of parts."""
    if isinstance(content, str):
        return content[:PART_CHARACTERS]
    if not isinstance(content, Sequence):
        return ""
    texts = [part.get("text") for part in islice(content, PART_CHARACTERS) if isinstance(part, Mapping)]
    return "\n".join(text[:PART_CHARACTERS] for text in texts if isinstance(text, str))[:PART_CHARACTERS]


def _prompt_part(prompt: Any) -> str:
    """Return the beginning of the first prompt: a text, a list of texts, token ids or a list of these."""
    if isinstance(prompt, str):
        return prompt[:PART_CHARACTERS]
    if not isinstance(prompt, list) or not prompt:
        return ""
    first = prompt[0]
    if isinstance(first, str):
        return first[:PART_CHARACTERS]
    ids = first if isinstance(first, list) else prompt
    return ",".join(str(token) for token in ids[:PART_TOKENS] if isinstance(token, int))


def _digest(parts: list[str]) -> bytes:
    # JSON separates the parts, so that no two lists have the same digest. Lone surrogates are escaped by it.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
