"""Constants of the planner. "Trade" marks a value that was chosen in the simulator (docs/dev/simulator.md)."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_SECONDS = 3600.0
"""Period of ``StabilityLimits.max_changes_per_hour``."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the estimates and of the decision rule."""

    # --- acceptance: pseudo-observations and correlations
    prior_drafts: float = 10.0
    """Drafts that the depth above (or the main path, or the prior of ranks) counts for. Trade."""
    task_prior_drafts: float = 30.0
    """Drafts that all tasks together count for in one task. Trade."""
    prior_effect: float = 4.0
    """Design effect of requests before any has finished (ratio of variances): recorded answers show 2 to 8."""
    prior_requests: float = 20.0
    """Finished requests that ``prior_effect`` counts for. Trade."""
    rank_share: float = 0.2
    """Share of the misses that rank 1 hits before it was measured, halved with each rank: half of an EAGLE-3 head's."""
    depth_correlation: float = 0.3
    """Correlation of the errors of one task's acceptance at two depths: recorded answers."""
    request_spread: float = 0.2
    """Standard deviation between requests of log(tokens after / tokens before) of a change: recorded 0.02 to 0.17."""
    # --- forgetting and change points
    half_life_drafts: float = 300.0
    """Drafts, times the design effect, after which an acceptance counts for half. Trade."""
    half_life_samples: float = 128.0
    """Steps after which a step time counts for half, and requests after which traffic does. Trade."""
    recent_seconds: float = 20.0
    """Seconds before which no estimate counts for half, during which evidence is new, and that a trial is timed: four
    polls. Trade."""
    contradicted_weight: float = 0.25
    """Weight of contradicted evidence, as a share of the new evidence. Trade."""
    rate_change_errors: float = 3.0
    """Standard errors between two acceptance rates that are a change point: one false alarm in 370."""
    time_change_errors: float = 4.0
    """Standard errors between two step times that are a change point: step times have heavier tails."""
    min_samples: float = 8.0
    """Steps or drafts that outweigh a prior of step times, and below which nothing shows a change. Trade."""
    # --- step times
    model_error: float = 0.05
    """Relative error of the linear model beyond noise: recorded step times."""
    knots: tuple[float, ...] = (8.0, 32.0, 128.0)
    """Verified tokens of a step at which the slope over tokens may change, at edges of the kinds of step. Trade."""
    bends: tuple[float, float] = (1e-3, 0.15)
    """Standard deviation of what a knot adds to a step, as a share of the mean step: if the line is straight, and if it
    bends. Trade."""
    bend_evidence: float = 5.0
    """Log of the ratio of both likelihoods above which it bends. Before serving it is 83 for Llama 4 Scout and 6 for
    Maverick. Trade."""
    carried_error: float = 0.15
    """Relative error of a time carried over from another shape; a smaller shift of a mean is noise. Recorded steps."""
    load_ratio: float = 1.5
    """Largest ratio of sequences, tokens or times of steps that say something about each other. Trade."""
    wander_share: float = 0.1
    """Weight of one poll in the variance of means between polls. Trade."""
    wander_limit: float = 4.0
    """Most that one poll counts for in it, relative to what is usual: a single jump is no wander. Trade."""
    least_seconds: float = 1e-7
    """Seconds of a step below which it was not timed: no device is as fast."""
    # --- decision
    z: float = 1.28
    """Standard errors by which a gain must exceed its cost: 90 % confidence."""
    z_changed: float = 0.84
    """The same after a change point outdated the evidence behind the present shapes: 80 % confidence."""
    trial_polls: float = 4.0
    """Polls over which a trial averages the wander of step times: ``recent_seconds`` of five seconds each."""
    measured_error: float = 0.03
    """Relative error that a trial leaves, and smallest loss that is believed: recorded noise of 15 s."""
    drift_per_dwell: float = 0.065
    """Standard deviation per square root of ``minDwellSeconds`` by which an unmeasured gain drifts. Trade."""
    window_seconds: float = 60.0
    """Seconds between choices for loads other than the present one, after which a trial ends unmeasured, and without
    traffic after which a task is absent and no trial begins: as long as the window of measurements."""
    # --- samples
    least_share: float = 0.005
    """Smallest share of the sequences that a task or a kind of batch counts with, and least acceptance rate. Trade."""
    fleet_samples: float = 500.0
    """Drafts or tokens below which no figure of the fleet is shown: an error over 2 %."""
    task_samples: float = 50.0
    """The same for a task, which has no rows of its own before either: an error over 7 %."""
    context_edges: tuple[int, int] = (1024, 8192)
    """Edges of the context buckets, in tokens. They are fixed, so that stored step times stay comparable."""


TUNING = Tuning()
