"""Pools of small domains: what is pooled, and what a pool can and cannot hide."""

from __future__ import annotations

import numpy as np
import pytest

from specdecode_worker.training.evaluation import (
    CAPTURED_POOL,
    GOLDEN_POOL,
    Domain,
    PairedStepCosts,
    compute_verdict,
    pool_small_domains,
)

SAME = PairedStepCosts(np.full(40, 0.02), np.full(40, 0.02))


def domain(name: str, weight: float, count: int, gain: float = 0.3) -> Domain:
    deployed_C = np.full(count, 50.0)
    return Domain(name, weight, np.full(count, 100.0), deployed_C, deployed_C / (1 + gain))


def names(*domains: Domain) -> list[str]:
    return [one.name for one in pool_small_domains(domains).domains]


def test_large_domains_are_judged_by_themselves() -> None:
    assert names(domain("a", 0.5, 64), domain("b", 0.5, 64)) == ["a", "b"]


def test_small_domains_of_a_kind_are_pooled() -> None:
    pooled = pool_small_domains(
        [
            domain("a", 0.9, 80), domain("b", 0.06, 40), domain("c", 0.04, 30),
            domain("golden/x", 0.0, 40), domain("golden/y", 0.0, 40),
        ]
    )  # fmt: skip
    assert [one.name for one in pooled.domains] == ["a", CAPTURED_POOL, GOLDEN_POOL]
    assert pooled.members == {CAPTURED_POOL: ("c", "b"), GOLDEN_POOL: ("golden/x", "golden/y")}
    pool = pooled.domains[1]
    assert pool.weight == pytest.approx(0.1)
    assert len(pool.tokens_C) == 70


def test_pool_that_is_too_small_takes_in_the_next_domain() -> None:
    pooled = pool_small_domains([domain("golden/x", 0.0, 5), domain("golden/y", 0.0, 70), domain("golden/z", 0.0, 90)])
    assert pooled.members == {GOLDEN_POOL: ("golden/x", "golden/y")}
    assert [one.name for one in pooled.domains] == ["golden/z", GOLDEN_POOL]


def test_one_small_domain_remains_where_nothing_can_join_it() -> None:
    assert names(domain("a", 0.95, 80), domain("b", 0.05, 10)) == ["a", "b"]


def test_domain_with_much_of_the_traffic_is_never_pooled() -> None:
    parts = [domain("a", 0.7, 80), domain("b", 0.2, 10), domain("c", 0.05, 40), domain("d", 0.05, 40)]
    assert names(*parts) == ["a", "b", CAPTURED_POOL]
    verdict = compute_verdict(pool_small_domains(parts).domains, SAME, wanted_gain=0.02)
    assert verdict.finding == "inconclusive"


def test_pooling_makes_a_verdict_possible() -> None:
    parts = [domain("a", 0.9, 80), domain("b", 0.05, 40), domain("c", 0.05, 40)]
    assert compute_verdict(parts, SAME, wanted_gain=0.02).finding == "inconclusive"
    assert compute_verdict(pool_small_domains(parts).domains, SAME, wanted_gain=0.02).finding == "better"


def test_loss_of_a_pool_is_a_veto() -> None:
    parts = [domain("a", 0.9, 80), domain("b", 0.05, 40, gain=-0.1), domain("c", 0.05, 40, gain=-0.1)]
    assert compute_verdict(pool_small_domains(parts).domains, SAME, wanted_gain=0.02).finding == "worse"
