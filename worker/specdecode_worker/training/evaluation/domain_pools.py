"""Pools of small domains: domains with too few conversations for a verdict of their own are judged together.

A pool keeps the verdict possible where traffic has many rare tasks. It cannot hide a large domain: one with at least
``LARGEST_POOLED_SHARE`` of the traffic is judged by itself, however few its conversations are. Captured and golden
domains are pooled apart, because the first count for the mix and the second guard what the deployed draft knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdecode_worker.training.evaluation.draft_verdict import MIN_CONVERSATIONS, Domain

LARGEST_POOLED_SHARE = 0.1
"""Share of the traffic's tokens from which a domain is never pooled."""
CAPTURED_POOL, GOLDEN_POOL = "pool of small domains", "golden/pool of small domains"


@dataclass(frozen=True, slots=True)
class PooledDomains:
    """Domains to judge. ``members`` maps the name of a pool to the names of the domains in it."""

    domains: tuple[Domain, ...]
    members: dict[str, tuple[str, ...]]


def pool_small_domains(domains: Sequence[Domain]) -> PooledDomains:
    """Return the domains with small ones pooled; at most one pool of captured and one of golden domains.

    A pool that is itself too small takes in the smallest other domain of its kind, if that one may be pooled.
    """
    judged: list[Domain] = []
    members: dict[str, tuple[str, ...]] = {}
    for name, kind in (
        (CAPTURED_POOL, [domain for domain in domains if domain.weight > 0]),
        (GOLDEN_POOL, [domain for domain in domains if not domain.weight > 0]),
    ):
        pooled = _members(kind)
        judged += [domain for domain in kind if domain not in pooled]
        if pooled:
            judged.append(_pool(name, pooled))
            members[name] = tuple(domain.name for domain in pooled)
    return PooledDomains(tuple(judged), members)


def _members(domains: Sequence[Domain]) -> list[Domain]:
    """Return the domains of one kind to pool; none if fewer than two would be together."""
    eligible = sorted((d for d in domains if d.weight < LARGEST_POOLED_SHARE), key=_conversations)
    pooled = [domain for domain in eligible if _conversations(domain) < MIN_CONVERSATIONS]
    if pooled and sum(map(_conversations, pooled)) < MIN_CONVERSATIONS:
        pooled = eligible[: len(pooled) + 1]
    return pooled if len(pooled) > 1 else []


def _pool(name: str, domains: Sequence[Domain]) -> Domain:
    return Domain(
        name,
        sum(domain.weight for domain in domains),
        np.concatenate([domain.tokens_C for domain in domains]),
        np.concatenate([domain.deployed_C for domain in domains]),
        np.concatenate([domain.candidate_C for domain in domains]),
    )


def _conversations(domain: Domain) -> int:
    return len(domain.tokens_C)
