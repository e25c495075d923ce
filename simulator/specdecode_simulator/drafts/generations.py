"""Generations of a draft over months of traffic that drifts away and comes back.

The canary test is the operator's, and the phases follow each other as there: evaluation, trial, promotion. Training is
a model. A draft knows a topic by how near it is to what the draft was trained on; a run continues the draft in use on
the traffic of its month with replayed old text, and is judged as a training Job judges: by lower bounds over the mix
and over the golden set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from specdecode_operator.drafts.crossover import Verdict
from specdecode_simulator.drafts.canary_trials import TASK_COSTS, trial

RECOVERY, FORGETTING = 0.126, 0.02
"""Log gain of a run on traffic that the draft had lost (benchmarks/reports/distillation-2026-11-25.md), and what a run
loses on text that it does not replay."""
BOUND_ERROR = 0.01
"""Standard error of a gain that a training Job measures: its bounds of 0.092 to 0.179 are of a short run."""
MIN_GAIN, TOLERATED_LOSS = 0.02, -0.02
CONFIDENT_ERRORS = 1.96
TOPICS = 12
"""Topics of a year. Traffic is of one of them at a time, and the golden set of all."""
KEPT = 3
"""Drafts that files are kept of: in use, before it, and candidate."""

Outcome = Literal["NotBetter", "Promoted", "RolledBack", "Undecided"]
"""Outcomes of a candidate: the first is the evaluation's, the others are of the canary test."""
_VERDICTS: Mapping[Verdict, Outcome] = {Verdict.PROMOTE: "Promoted", Verdict.ROLL_BACK: "RolledBack"}


@dataclass(frozen=True, slots=True)
class Draft:
    """Log speed by topic, over that of the first draft where it was trained."""

    name: str
    speed: tuple[float, ...]

    @property
    def golden(self) -> float:
        """Mean log speed over the golden set."""
        return float(np.mean(self.speed))


@dataclass(slots=True)
class Generation:
    """Results of one month."""

    topic: int
    outcome: Outcome
    is_equal: bool
    """The candidate was not faster than the draft in use."""
    loop: float
    """Log speed of the draft in use at the end of the month, on the traffic of the month."""
    static: float
    """Log speed of the first draft on the same traffic."""
    golden: float
    stored: int
    """Drafts that files are kept of."""


@dataclass(slots=True)
class Year:
    """A deployment with its drafts, month by month."""

    generator: Any
    replays: bool = True
    """Half of each round of training is old text."""
    current: str = "d0"
    previous: str = "d0"
    drafts: dict[str, Draft] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The first draft knows the first topic, and less of the others the farther they are.
        away = (abs((topic + TOPICS // 2) % TOPICS - TOPICS // 2) for topic in range(TOPICS))
        self.drafts = {"d0": Draft("d0", tuple(-RECOVERY * min(1.0, 2 * one / TOPICS) for one in away))}

    def months(self, count: int) -> Iterator[Generation]:
        """Yield the months. The traffic goes around the topics, and comes back to the first one."""
        first = self.drafts["d0"]
        for month in range(1, count + 1):
            topic = month % TOPICS
            parent = self.drafts[self.current]
            candidate = self._trained(f"d{month}", parent, topic)
            outcome = self._rolled_out(candidate, parent, topic)
            used = self.drafts[self.current]
            gain = candidate.speed[topic] - parent.speed[topic]
            yield Generation(
                topic, outcome, gain <= 0, used.speed[topic], first.speed[topic], used.golden, len(self.drafts)
            )

    def _trained(self, name: str, parent: Draft, topic: int) -> Draft:
        """Return the parent continued on the traffic of a topic: near it recovers, and what is not replayed is lost."""
        noise, speed = self.generator.normal(0, BOUND_ERROR / 2, TOPICS), list(parent.speed)
        for other in range(TOPICS):
            near = math.exp(-(((other - topic + TOPICS // 2) % TOPICS - TOPICS // 2) ** 2) / 2)
            kept = FORGETTING * (1 - near) * (0.0 if self.replays else 1.0)
            speed[other] += near * (0.0 - speed[other]) - kept + noise[other] * near
        return Draft(name, tuple(speed))

    def _rolled_out(self, candidate: Draft, parent: Draft, topic: int) -> Outcome:
        """Evaluate and try the candidate, and promote it if it is better. Return what became of it."""
        gain, golden = candidate.speed[topic] - parent.speed[topic], candidate.golden - parent.golden
        if not self._is_better(gain, golden):
            return "NotBetter"
        verdict, _ = trial(self.generator, dict.fromkeys(TASK_COSTS, math.expm1(gain)))
        outcome = _VERDICTS.get(verdict, "Undecided")
        self.drafts[candidate.name] = candidate
        if outcome == "Promoted":
            self.current, self.previous = candidate.name, self.current
        kept = {self.current, self.previous, "d0"}
        self.drafts = {name: draft for name, draft in self.drafts.items() if name in kept}
        return outcome

    def _is_better(self, gain: float, golden: float) -> bool:
        """Return the verdict of a training Job: lower bounds of the mix and of the golden set."""
        noise = self.generator.normal(0, BOUND_ERROR, 2) - CONFIDENT_ERRORS * BOUND_ERROR
        return bool(gain + noise[0] > MIN_GAIN and golden + noise[1] > TOLERATED_LOSS)


def years(seeds: int, count: int = 2 * TOPICS, *, replays: bool = True) -> list[list[Generation]]:
    """Return the generations of many deployments."""
    return [list(Year(np.random.default_rng([seed, 49]), replays).months(count)) for seed in range(seeds)]


def gain_and_error(found: list[list[Generation]]) -> tuple[float, float]:
    """Return the log gain of the loop over the first draft in the months after drift, and half of its 95 % bounds."""
    means = [np.mean([one.loop - one.static for one in months if one.static < -RECOVERY / 2]) for months in found]
    return float(np.mean(means)), float(CONFIDENT_ERRORS * np.std(means, ddof=1) / math.sqrt(len(means)))
