"""Rules of other engines and autoscalers, each on loads made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdecode_simulator.policies.engine_rules import (
    AdaptiveVerification,
    BatchTable,
    Goodput,
    OneWayGate,
    StepTiers,
)
from specdecode_simulator.policies.scalers import Hpa, Saturation, Throughput
from specdecode_simulator.policies.upstream_rules import SGLANG_DEFAULT, AcceptanceEstimator, draft_budget
from specdecode_simulator.records.acceptance_walks import VERIFIED
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.traces.trace import Kind
from support.small_simulation import ONE, depths_over, load_of, table_of

GOOD, BAD = [0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45], [0.1, 0.02, 0.01, 0.0, 0.0, 0.0, 0.0]


def test_the_batch_table_reads_inclusive_edges() -> None:
    rule = BatchTable((4, 16), (3, 2, 0))
    assert [depths_over(rule, load_of(n), GOOD, 1)[0] for n in (1, 4, 5, 16, 17)] == [3, 3, 2, 2, 0]


def test_steps_climb_on_good_acceptance_and_fall_on_bad() -> None:
    rule = StepTiers(SGLANG_DEFAULT, alpha=0.2)
    assert depths_over(rule, load_of(2), [0.98] * 7, 20)[-1] == 7
    assert depths_over(rule, load_of(2), BAD, 40)[-1] == 1
    assert depths_over(rule, load_of(70), GOOD, 1) == [0], "no drafts from 64 on"


def test_a_batch_size_without_drafts_tries_one_pass_again() -> None:
    rule = StepTiers(SGLANG_DEFAULT, alpha=0.2)
    depths = depths_over(rule, load_of(10), BAD, 60)
    assert {0, 1} == set(depths[10:]), "it stops, and looks again after five batches"


def test_the_one_way_gate_closes_and_never_opens() -> None:
    rule = OneWayGate(3, window=5, threshold=0.5)
    assert depths_over(rule, load_of(2), GOOD, 20)[-1] == 3
    assert depths_over(rule, load_of(2), BAD, 20)[-1] == 0
    assert set(depths_over(rule, load_of(2), GOOD, 50)) == {0}


def test_goodput_weighs_acceptance_against_cost() -> None:
    cheap, dear = table_of(0.00001), table_of(0.004)
    for table, acceptance, wanted in ((cheap, GOOD, (5, 6, 7)), (dear, BAD, (0,)), (cheap, BAD, (0, 1))):
        rule = Goodput(table.seconds, alpha=0.1, interval=16)
        assert depths_over(rule, load_of(8), acceptance, 40)[-1] in wanted


def adaptive(library: Library, token_seconds: float) -> AdaptiveVerification:
    kinds = (Kind(domain="qa"),)
    table = table_of(token_seconds)
    return AdaptiveVerification(table, library.records, kinds, lambda kind, now, context: 0.0, drafted=5)


def test_adaptive_verification_drafts_all_and_verifies_fewer_where_tokens_are_dear(library: Library) -> None:
    verified = []
    for token_seconds in (0.0, 0.002, 0.02):
        segment = adaptive(library, token_seconds).next(load_of(4))
        walk = library.records.walk(0.0, segment.forms[ONE])
        _, sums = walk.advance(np.arange(0, 13000, 13), 8)
        assert (sums[:, 8] <= sums[:, VERIFIED]).all()
        assert segment.drafted_depth == 5
        verified.append(sums[:, VERIFIED].mean() / 8)
    assert verified[0] == 5
    assert verified == sorted(verified, reverse=True)
    assert 0 < verified[1] < 5


def test_alone_a_request_verifies_what_upstream_would(library: Library) -> None:
    """One request is a whole batch: its verified tokens are the budget of most tokens in the same time."""
    rule = adaptive(library, 0.002)
    form = rule.next(load_of(1)).forms[ONE]
    roots = np.arange(0, 13000, 97)
    _, sums = library.records.walk(0.0, form).advance(roots, 1)
    confidences = rule.estimator.predict(library.records.features(0.0)[roots][:, :5])
    costs = np.array([0.0, *form.trim.costs])
    wanted = [draft_budget(np.cumprod(own), 1, 1, 0.0, costs, 5) for own in confidences]
    assert sums[:, VERIFIED].tolist() == wanted


def test_confidence_is_learned_from_graded_drafts(library: Library) -> None:
    """After some refits, mean predictions by depth are the acceptance rates, and surer tokens are more often right."""
    estimator, generator = AcceptanceEstimator(5), np.random.default_rng(1)
    for _ in range(12):
        features, right = library.records.sample("qa", 0.3, 2000, generator)
        accepted = np.minimum(right, 5)
        estimator.add(features[:, :5], estimator.predict(features[:, :5]), accepted, np.full(2000, 5))
        estimator.refit()
    features, right = library.records.sample("qa", 0.3, 20000, generator)
    predictions = estimator.predict(features[:, :5])
    for depth in range(3):
        reached = right >= depth
        assert predictions[reached, depth].mean() == pytest.approx((right > depth)[reached].mean(), abs=0.03)
    sure = predictions[:, 0] > np.median(predictions[:, 0])
    assert (right[sure] > 0).mean() > (right[~sure] > 0).mean() + 0.2


# --- replicas -------------------------------------------------------------------------------------------------------


def fleet_of(wanted: int = 2, kv_used: int = 100, queue: int = 0) -> Any:
    """Return as much of a Fleet as scaling rules read."""
    limits = SimpleNamespace(kv_tokens=1000, max_num_seqs=16)
    worker = SimpleNamespace(kv_used=kv_used, queue=[0] * queue, limits=limits, decode_seconds=0.0, tokens=0.0)
    pods = [SimpleNamespace(worker=worker)] * wanted
    trace = SimpleNamespace(ttit_seconds=0.05, limits=limits)
    workers = [worker] * wanted
    return SimpleNamespace(wanted=wanted, ready=pods, staying=pods, workers=workers, trace=trace, jobs=(), arrivals=0)


@pytest.mark.parametrize(("metric", "wanted"), [(20.0, 2), (21.9, 2), (40.0, 4), (200.0, 6)])
def test_hpa_scales_up_by_the_ratio_within_tolerance_and_speed(metric: float, wanted: int) -> None:
    """Up at most double or by four pods at a time."""
    assert Hpa(lambda fleet: metric, target=10.0).wanted(fleet_of(), 0.0) == wanted


def test_hpa_goes_down_only_after_its_window() -> None:
    wishes = [40.0]
    rule = Hpa(lambda fleet: wishes[-1], target=10.0, down_seconds=60.0)
    assert rule.wanted(fleet_of(wanted=2), 0.0) == 4
    wishes.append(5.0)
    found = [rule.wanted(fleet_of(wanted=4), 15.0 * look) for look in range(1, 7)]
    assert found == [4, 4, 4, 4, 1, 1]


@pytest.mark.parametrize(
    ("kv_used", "queue", "wanted"), [(100, 0, 1), (750, 0, 3), (100, 6, 3), (450, 0, 2), (900, 9, 3)]
)
def test_saturation_looks_at_what_is_spare(kv_used: int, queue: int, wanted: int) -> None:
    assert Saturation().wanted(fleet_of(kv_used=kv_used, queue=queue), 60.0) == wanted


def test_throughput_planning_follows_the_last_interval() -> None:
    rule = Throughput(table_of(0.0001), accepted=1.5, interval=60.0, correction=False)
    fleet = fleet_of()
    assert rule.wanted(fleet, 0.0) == 2
    fleet.jobs = (SimpleNamespace(prompt=100, output=500),) * 630
    fleet.arrivals = 30
    few = rule.wanted(fleet, 60.0)
    fleet.arrivals = 630
    many = rule.wanted(fleet, 120.0)
    assert many >= 5 * few
