"""Workers whose acceptance a test sets, request by request, for the drift of a draft."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.state.learned import DriftState, Session, TaskDrift
from specdecode_operator.state.store import draft_writes
from specdecode_operator.types import Deployment, Worker
from specdecode_worker.contract import DraftState, Report, RequestCell, TaskCell, TrafficCell, TrialState
from support.operators.fleet import decided, deployment_with, restarted, workload_with
from support.operators.reports import main_cell, step_cell, step_values

DAY = 86_400.0
USUAL = (0.8, 0.7, 0.6)
"""2.70 tokens a step of a chain of three."""
SLOWER = tuple(0.794 * rate for rate in USUAL)
"""20 % fewer tokens a step."""
SPREAD = 0.1
"""Standard deviation of a request's log acceptance: requests of a task differ."""
DRAFTS = 40
"""Drafts of a request."""
STEP = step_values(0.02, 1, (1.0, 1.0, 1.0, 100.0, 0.0, 0.0))


@dataclass
class Pod:
    """Counters of one worker."""

    name: str
    draft: str = "d1"
    trial: TrialState | None = None
    ranks: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def serve(self, coins: random.Random, task: str, rates: tuple[float, ...], depth: int) -> None:
        """Count one request. A depth of 0 decodes without a draft."""
        self.finished[task] += 1
        self.steps += DRAFTS
        factor = math.exp(SPREAD * coins.gauss(0, 1))
        positions = DRAFTS
        for level, rate in enumerate(rates[:depth], start=1):
            hits = sum(coins.random() < min(0.99, factor * rate) for _ in range(positions))
            self.ranks[task, level, True] += hits
            self.ranks[task, level, False] += positions - hits
            positions = hits

    def report(self, clock: float) -> Report:
        cells = sorted({(task, level) for task, level, _ in self.ranks})
        return Report(
            boot_id="boot",
            worker=self.name,
            clock_seconds=clock,
            draft=DraftState(method="eagle3", hash=self.draft),
            trial=self.trial,
            plain_steps=self.steps,
            acceptance=tuple(
                main_cell(
                    self.draft, task, level, (self.ranks[task, level, True], *[0] * 7, self.ranks[task, level, False])
                )
                for task, level in cells
            ),
            requests=tuple(
                RequestCell(draft=self.draft, task=task, sampled=False, n=count, a=count, d=count, aa=0, ad=0, dd=0)
                for task, count in self.finished.items()
            ),
            traffic=tuple(
                TrafficCell(
                    task=task, arrivals=count, finished=count, prompt_tokens=0, cached_tokens=0, output_tokens=count
                )
                for task, count in self.finished.items()
            ),
            tasks=tuple(
                TaskCell(task=task, decode_steps=count * DRAFTS, decode_tokens=count * DRAFTS)
                for task, count in self.finished.items()
            ),
            steps=(step_cell(1, 0, 0, [value * self.steps for value in STEP]),),
        )


@dataclass
class Drifting:
    """The decision closed over workers, with a poll for every few requests."""

    deployment: Deployment
    rates: dict[str, tuple[float, ...]]
    """Acceptance by task, at depths 1, 2 and 3."""
    shares: dict[str, float]
    """Share of the requests by task."""
    requests_per_day: int = 500
    per_poll: int = 20
    """Requests between two polls."""
    depth: int = 3
    seed: int = 0
    now: float = 1_000_000.0
    pods: list[Pod] = field(default_factory=lambda: [Pod("p")])
    session: Session = field(default_factory=Session)
    drafts: tuple[SpecDecodeDraft, ...] = ()
    """At most one: that of a promotion."""
    records: list[DecisionRecord] = field(default_factory=list)
    """All drifts that began or ended, and all requests of runs."""

    def __post_init__(self) -> None:
        self.coins = random.Random(self.seed)
        self._poll()

    @property
    def drift(self) -> DriftState:
        return self.session.learned.drift

    def task(self, name: str = "other") -> TaskDrift:
        return self.drift.task(name)

    @property
    def begun(self) -> list[str]:
        return [record.load for record in self.records if record.kind == "Drift" and record.cause != "over"]

    def serve(self, requests: int) -> None:
        """Serve requests at the rate of the day, on all workers in turn."""
        names, weights = list(self.shares), list(self.shares.values())
        for number in range(requests):
            task = self.coins.choices(names, weights)[0] if len(names) > 1 else names[0]
            self.pods[number % len(self.pods)].serve(self.coins, task, self.rates[task], self.depth)
            self.now += DAY / self.requests_per_day
            if number % self.per_poll == self.per_poll - 1:
                self._poll()

    def days(self, count: float) -> None:
        self.serve(round(count * self.requests_per_day))

    def until_drift(self, most: int) -> int:
        """Serve until a drift is found. Return the requests; one more than ``most`` if none is found."""
        for served in range(0, most, self.per_poll):
            self.serve(self.per_poll)
            if self.begun:
                return served + self.per_poll
        return most + 1

    def change(self, **spec: Any) -> None:
        self.deployment = replace(self.deployment, spec=deployment_with(**spec).spec)

    def restart_operator(self) -> None:
        """Drop everything but what the state's ConfigMap has."""
        self.session = restarted(self.session)

    def wait(self, seconds: float) -> None:
        """Let time pass without requests, and poll."""
        self.now += seconds
        self._poll()

    def _poll(self) -> None:
        workers = tuple(
            Worker(name=pod.name, uid=pod.name, address=f"10.0.0.{index}", ready=True, report=pod.report(self.now))
            for index, pod in enumerate(self.pods)
        )
        writes = draft_writes(self.deployment, self.session.drafts, self.drafts, now=self.now)
        self.drafts = tuple(write.after for write in writes) or self.drafts
        seen = {"workload": workload_with(len(workers)), "workers": workers, "drafts": self.drafts}
        decision, self.session = decided(self.deployment, self.session, now=self.now, **seen)
        self.records += [record for record in decision.changes if record.kind in ("Drift", "Draft")]


def drifting(rates: dict[str, tuple[float, ...]] | None = None, **fields: Any) -> Drifting:
    """Return a deployment whose baseline is not learnt yet. Other fields are those of the spec."""
    own = {name: fields.pop(name) for name in ("requests_per_day", "depth", "seed", "shares", "pods") if name in fields}
    rates = rates or {"other": USUAL}
    shares = own.pop("shares", {name: 1 / len(rates) for name in rates})
    tasks = [{"name": name} for name in rates if name != "other"]
    spec = {**fields, **({"speculation": {"tasks": tasks}} if tasks else {})}
    return Drifting(deployment_with(**spec), rates, shares, **own)


@functools.cache
def _after_a_week() -> Drifting:
    served = drifting(requests_per_day=240)
    served.serve(1740)
    assert served.task().baseline is not None
    return served


def after_a_week() -> Drifting:
    """Return a deployment whose baseline is frozen, with 240 requests a day."""
    return copy.deepcopy(_after_a_week())


@functools.cache
def _after_a_drift() -> Drifting:
    served = after_a_week()
    served.rates["other"] = SLOWER
    served.until_drift(1200)
    served.serve(200)
    assert [record.kind for record in served.records] == ["Drift"]
    return served


def after_a_drift() -> Drifting:
    """Return a deployment whose draft became slower by a fifth, and which trains nothing by itself."""
    return copy.deepcopy(_after_a_drift())
