"""Salt of a request's cached prefix: requests with different salts share no blocks of the prefix cache."""

from __future__ import annotations

import hashlib
import json


def prefix_salt(client: str, cache_salt: str, *, shared: bool, router_salt: str = "") -> str:
    """Return the salt of a request; empty if it shares blocks with every request that has none.

    The salt is the same in every worker, so that a router can send a client to the worker that has its prefix.

    Args:
        client: Name of the request's API key; empty without keys.
        cache_salt: Field ``cache_salt`` of the request; empty if it has none.
        shared: True if clients share the prefix cache, as far as ``cache_salt`` does not separate them.
        router_salt: Salt that a router adds to the request; empty if it adds none.
    """
    parts = ["" if shared else client, cache_salt, *([router_salt] if router_salt else [])]
    if not any(parts):
        return ""
    # JSON keeps the parts apart, so that no combination of values has the salt of another one.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
