"""Statistics of the verdict on synthetic times: findings, properties, error rates, and pools of small domains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_worker.training.evaluation import (
    CAPTURED_POOL,
    GOLDEN_POOL,
    Domain,
    PairedStepCosts,
    Verdict,
    compute_verdict,
    pool_small_domains,
)

SECONDS = np.full(40, 0.02)
SAME = PairedStepCosts(SECONDS, SECONDS)


def drawn(
    rng: np.random.Generator, gain: float, *, name: str = "d", weight: float = 1.0, count: int = 100, noise: float = 0.1
) -> Domain:
    """Return conversations in which the candidate takes fewer steps by ``gain`` on average.

    The gain of each conversation has log-normal noise of scale ``noise``.
    """
    tokens_C = rng.integers(40, 400, size=count).astype(float)
    deployed_C = tokens_C / rng.uniform(1.4, 2.6, size=count)
    candidate_C = deployed_C / (1 + gain) * np.exp(rng.normal(-(noise**2) / 2, noise, size=count))
    return Domain(name, weight, tokens_C, deployed_C, candidate_C)


def verdict(gain: float, *, wanted: float = 0.02, golden: float = 0.0, seed: int = 0, count: int = 100) -> Verdict:
    rng = np.random.default_rng(seed)
    parts = [drawn(rng, gain, count=count), drawn(rng, golden, name="golden/g", weight=0.0, count=count, noise=0.04)]
    return compute_verdict(parts, SAME, wanted_gain=wanted)


@pytest.mark.parametrize(
    ("gain", "golden", "finding"),
    [
        (0.15, 0.0, "better"),
        (0.15, 0.15, "better"),
        (0.15, -0.12, "worse"),
        (0.02, 0.0, "inconclusive"),
        (0.0, 0.0, "inconclusive"),
        (-0.1, 0.0, "worse"),
        (0.15, -0.02, "inconclusive"),
    ],
)
def test_clear_differences_are_detected(gain: float, golden: float, finding: str) -> None:
    draft_verdict = verdict(gain, golden=golden)
    assert draft_verdict.finding == finding, draft_verdict
    assert draft_verdict.exit_code == {"better": 0, "worse": 2, "inconclusive": 3}[finding]
    assert draft_verdict.reasons


def test_too_few_conversations_in_one_domain_are_inconclusive() -> None:
    rng = np.random.default_rng(0)
    many, few = drawn(rng, 0.5, name="many"), drawn(rng, 0.5, name="few", count=63)
    for parts in ([many, few], [drawn(rng, -0.5, name="bad"), few]):
        draft_verdict = compute_verdict(parts, SAME, wanted_gain=0.02)
        assert draft_verdict.finding == "inconclusive"
        assert "few: 63 conversations" in draft_verdict.reasons
    assert compute_verdict([many, drawn(rng, 0.5, name="few", count=64)], SAME, wanted_gain=0.02).finding == "better"


def test_no_captured_conversations_are_inconclusive() -> None:
    rng = np.random.default_rng(0)
    nothing = np.empty(0)
    for parts in ([], [drawn(rng, 0.5, weight=0.0)], [Domain("d", 1.0, nothing, nothing, nothing)]):
        assert compute_verdict(parts, SAME, wanted_gain=0.0).finding == "inconclusive"


def test_noisy_step_costs_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    parts = [drawn(rng, 0.1, noise=0.02)]
    noisy = PairedStepCosts(SECONDS * np.exp(rng.normal(0, 0.5, 40)), SECONDS * np.exp(rng.normal(0, 0.5, 40)))
    mix = compute_verdict(parts, noisy, wanted_gain=0.0).mix
    steady = compute_verdict(parts, SAME, wanted_gain=0.0).mix
    assert mix.upper - mix.lower > 5 * (steady.upper - steady.lower)


def test_slowdown_of_both_drafts_cancels_out() -> None:
    rng = np.random.default_rng(0)
    slow_R = np.exp(rng.normal(0, 1.0, 40))
    drifting = compute_verdict([drawn(rng, 0.1)], PairedStepCosts(SECONDS * slow_R, SECONDS * slow_R), wanted_gain=0.02)
    assert drifting.finding == "better"


def test_one_disturbed_round_does_not_change_the_costs() -> None:
    rng = np.random.default_rng(0)
    parts = [drawn(rng, 0.1)]
    disturbed = SECONDS.copy()
    disturbed[7] = 3.0
    assert compute_verdict(parts, PairedStepCosts(SECONDS, disturbed), wanted_gain=0.02).finding == "better"


def test_mix_weights_domains_by_their_tokens() -> None:
    """The gain over the mix of two domains with exact step counts: 100 tokens in 50 steps, against 40 or 50 steps."""
    tokens = np.full(64, 100.0)
    faster = Domain("a", 0.25, tokens, tokens / 2, tokens / 2.5)
    same = Domain("b", 0.75, tokens, tokens / 2, tokens / 2)
    draft_verdict = compute_verdict([faster, same], SAME, wanted_gain=0.0)
    assert draft_verdict.mix.estimate == pytest.approx(0.5 / (0.25 * 0.4 + 0.75 * 0.5) - 1)
    assert (draft_verdict.mix.lower, draft_verdict.mix.upper) == pytest.approx((draft_verdict.mix.estimate,) * 2), (
        "nothing to doubt"
    )
    assert draft_verdict.domains["a"].estimate == pytest.approx(0.25)
    assert draft_verdict.domains["b"].estimate == pytest.approx(0.0)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 300), st.integers(1, 300)), min_size=64, max_size=90),
       st.floats(0.2, 5.0), st.floats(-0.5, 0.5))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_verdict_invariants(rows: list[tuple[int, int, int]], cost: float, wanted: float) -> None:
    tokens, a, b = np.array(rows, float).T
    costs = PairedStepCosts(SECONDS, SECONDS * cost)
    draft_verdict = compute_verdict([Domain("d", 1.0, tokens, a, b)], costs, wanted_gain=wanted)
    mix, alone = draft_verdict.mix, draft_verdict.domains["d"]
    assert mix.lower <= mix.upper
    assert mix.estimate == pytest.approx(a.sum() / (b.sum() * cost) - 1)
    assert (mix.lower, mix.upper) == pytest.approx((alone.lower, alone.upper)), "a mix of one domain is that domain"
    if draft_verdict.finding == "better":
        assert mix.lower > wanted
        assert alone.lower > -0.02
    assert (draft_verdict.finding == "worse") == (alone.upper < -0.02 or mix.upper < 0)
    swapped = compute_verdict(
        [Domain("d", 1.0, tokens, b, a)], PairedStepCosts(costs.candidate_R, costs.deployed_R), wanted_gain=0.0
    )
    if draft_verdict.finding == "better" and wanted >= 0:
        assert swapped.finding == "worse", "what is better one way round is worse the other"
    assert compute_verdict([Domain("d", 1.0, tokens, a, b)], costs, wanted_gain=wanted) == draft_verdict, (
        "the same data, the same word"
    )


@pytest.mark.slow
def test_equal_drafts_are_rarely_called_better() -> None:
    """Drafts that are equal on average are rarely called better.

    With a wanted gain of zero, 2.5 % of such pairs are expected to be called better, and at most one in ten is
    acceptable. The test draws 300 pairs, whose drafts differ in every text.
    """
    called = {"better": 0, "worse": 0, "inconclusive": 0}
    for seed in range(300):
        rng = np.random.default_rng(1000 + seed)
        costs = PairedStepCosts(0.02 * np.exp(rng.normal(0, 0.02, 40)), 0.02 * np.exp(rng.normal(0, 0.02, 40)))
        called[compute_verdict([drawn(rng, 0.0, count=64, noise=0.2)], costs, wanted_gain=0.0).finding] += 1
    assert called["better"] <= 16, "binomial(300, 0.025) is above 15 once in a hundred runs"
    assert called["better"] + called["worse"] >= 4, "bounds that never exclude anything would be useless"


@pytest.mark.slow
def test_confidence_bounds_have_the_stated_coverage() -> None:
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(5000 + seed)
        mix = compute_verdict([drawn(rng, 0.1, count=100, noise=0.15)], SAME, wanted_gain=0.0).mix
        held += mix.lower <= 0.1 <= mix.upper
    assert 180 <= held <= 198


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
    assert compute_verdict(pool_small_domains(parts).domains, SAME, wanted_gain=0.02).finding == "inconclusive"


def test_pooling_makes_a_verdict_possible() -> None:
    parts = [domain("a", 0.9, 80), domain("b", 0.05, 40), domain("c", 0.05, 40)]
    assert compute_verdict(parts, SAME, wanted_gain=0.02).finding == "inconclusive"
    assert compute_verdict(pool_small_domains(parts).domains, SAME, wanted_gain=0.02).finding == "better"


def test_loss_of_a_pool_is_a_veto() -> None:
    parts = [domain("a", 0.9, 80), domain("b", 0.05, 40, gain=-0.1), domain("c", 0.05, 40, gain=-0.1)]
    assert compute_verdict(pool_small_domains(parts).domains, SAME, wanted_gain=0.02).finding == "worse"
