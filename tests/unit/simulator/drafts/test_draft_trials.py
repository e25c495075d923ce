"""Short forms of the trials of benchmarks/draft_statistics.py, with fixed seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdecode_operator.drafts.crossover import Verdict
from specdecode_simulator.drafts import generations
from specdecode_simulator.drafts.canary_trials import run_trials
from specdecode_simulator.drafts.drift_trials import count_false_alarms
from specdecode_simulator.drafts.generations import KEPT, TOLERATED_LOSS, Draft, Year, gain_and_error, years
from specdecode_simulator.drafts.request_costs import CostNoise, draw_requests

TRIALS = 60


def test_equal_drafts_are_rarely_promoted_or_rolled_back() -> None:
    result = run_trials({"code": 0.0, "prose": 0.0}, TRIALS, seed=1)
    assert result.share(Verdict.PROMOTE) + result.share(Verdict.ROLL_BACK) <= 0.05


@pytest.mark.parametrize(("gain", "verdict"), [(-0.05, Verdict.ROLL_BACK), (0.10, Verdict.PROMOTE)])
def test_unequal_drafts_get_their_verdict(gain: float, verdict: Verdict) -> None:
    result = run_trials({"code": gain, "prose": gain}, TRIALS, seed=2)
    assert result.share(verdict) >= 0.95
    assert result.median_requests < 4000


def test_a_candidate_that_loses_a_task_is_not_promoted() -> None:
    result = run_trials({"code": 0.25, "prose": -0.15}, TRIALS, seed=3)
    assert result.share(Verdict.PROMOTE) <= 0.05


def test_a_wide_spread_between_nodes_changes_no_verdict() -> None:
    """Both drafts of a pair run on one worker. The same trials on another node end after the same pairs."""
    gains = {"code": 0.05, "prose": 0.05}
    results = [run_trials(gains, 20, seed=4, noise=CostNoise(node=node)) for node in (0.0, 0.3)]
    assert results[0] == results[1]


def test_two_months_of_stationary_traffic_raise_at_most_two_alarms() -> None:
    alarms, threshold = count_false_alarms(60, 2000, seed=5)
    assert alarms <= 2
    assert threshold == pytest.approx(30 * 2000 / 20, rel=0.1), "batches in a month"


def test_noise_has_slow_parts_and_heavy_tails() -> None:
    """The trials would prove little if requests were independent and normal."""
    quiet = CostNoise(stall_chance=0.0)
    drawn = draw_requests(np.random.default_rng(0), 20_000, quiet)
    cost = np.log(drawn.seconds / drawn.tokens)
    cost -= cost.mean()
    smooth = cost.reshape(-1, 20).mean(axis=1)
    assert np.corrcoef(smooth[:-1], smooth[1:])[0, 1] > 0.2
    assert (cost**4).mean() / cost.var() ** 2 > 3.5


# --- generations ------------------------------------------------------------------------------------------------------


def test_the_loop_follows_a_drift_that_returns_and_forgets_no_golden_set() -> None:
    """Two years of monthly runs, with and without replayed old text, for eight deployments each."""
    for replays, least in ((True, 1.08), (False, 1.04)):
        found = years(8, replays=replays)
        months = [month for one in found for month in one]
        first = Year(np.random.default_rng(0)).drafts["d0"].golden
        assert sum(month.outcome == "Promoted" for month in months) >= (24 if replays else 60)
        assert min(month.golden for month in months) > first + TOLERATED_LOSS
        assert not [month for month in months if month.is_equal and month.outcome == "Promoted"]
        assert max(month.stored for month in months) <= KEPT
        gain, error = gain_and_error(found)
        assert math.exp(gain - error) > least, "over the first draft, in months that it has lost"


def test_without_the_bound_of_the_golden_set_it_would_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "FORGETTING", 0.08)
    first = Year(np.random.default_rng(0)).drafts["d0"].golden
    assert min(month.golden for one in years(4, replays=False) for month in one) > first + 2 * TOLERATED_LOSS
    monkeypatch.setattr(generations, "TOLERATED_LOSS", -1.0)
    assert min(month.golden for one in years(4, replays=False) for month in one) < first + 2 * TOLERATED_LOSS


def test_a_draft_that_learns_nothing_is_never_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate equals its parent but for the noise of measurements."""
    monkeypatch.setattr(generations, "RECOVERY", 0.0)
    monkeypatch.setattr(Year, "_trained", lambda year, name, parent, topic: Draft(name, parent.speed))
    months = [month for one in years(50) for month in one]
    assert not [month for month in months if month.outcome == "Promoted"]
