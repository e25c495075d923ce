"""Weighted rendezvous hashing: an order of workers for each key that changes little when workers come and go.

Every worker has a score that depends on the key and on this worker alone. A worker that joins therefore takes over only
the keys for which its score is the highest, and a worker that leaves loses only its own keys. A worker's share of the
keys is proportional to its weight.

References:
    Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 1998.
    Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005 (logarithmic method).
"""

from __future__ import annotations

import hashlib
import math

_BITS = 53
"""Bits of the hash that become a float without rounding."""


def rendezvous_score(key: bytes, name: str, weight: float) -> float:
    """Return the score of a worker for a key. The worker with the highest score comes first.

    Args:
        key: Digest of the affinity. All keys have the same length, so that no two keys and names are confused.
        name: Name of the worker.
        weight: Relative capacity of the worker, above 0.
    """
    digest = hashlib.blake2b(key + name.encode(errors="surrogatepass"), digest_size=8).digest()
    # Uniform in the open interval from 0 to 1: neither end has a finite, non-zero logarithm.
    uniform = ((int.from_bytes(digest, "big") >> (64 - _BITS)) + 0.5) / 2**_BITS
    return -weight / math.log(uniform)
