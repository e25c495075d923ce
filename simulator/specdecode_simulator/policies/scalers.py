"""Rules of other autoscalers, on top of the constrained oracle's depths: what differs is replicas alone.

After public documentation: Kubernetes' HorizontalPodAutoscaler (15 s, tolerance 0.1, stabilization), llm-d's Workload
Variant Autoscaler (saturation of KV and queue, spare triggers), NVIDIA Dynamo's planner (interval, constant predictor,
profiled throughput, correction factors). Written for this simulator.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from specdecode_simulator.policies.oracle import Constrained
from specdecode_simulator.records.step_times import StepTable
from specdecode_simulator.world.fleet import POLL_SECONDS, Fleet
from specdecode_simulator.world.plan_pilot import PlanPilot

TOLERANCE = 0.1
HPA_SECONDS = 15.0


class Rule(Protocol):
    """Replicas wanted at a poll, or None to leave them."""

    def wanted(self, fleet: Fleet, now: float) -> int | None: ...


@dataclass(slots=True)
class Scaled:
    """Depths as the constrained oracle has them, replicas by a rule."""

    depths: Constrained
    rule: Rule

    def pilot(self, fleet: Fleet, index: int) -> PlanPilot:
        return self.depths.pilot(fleet, index)

    def poll(self, fleet: Fleet, now: float) -> int | None:
        self.depths.poll(fleet, now)
        wanted = self.rule.wanted(fleet, now)
        return None if wanted is None else max(1, min(fleet.trace.most_replicas, wanted))

    @property
    def versions(self) -> int:
        return self.depths.versions


def requests(fleet: Fleet) -> float:
    """Running and waiting, as a gauge."""
    return float(sum(pod.worker.in_flight for pod in fleet.ready))


@dataclass(slots=True)
class OutputTokens:
    """Generated tokens a second of the fleet, over the time since the last look."""

    _before: float = 0.0
    _at: float = 0.0

    def __call__(self, fleet: Fleet) -> float:
        tokens = sum(worker.tokens for worker in fleet.workers)
        seconds = max(fleet.now - self._at, POLL_SECONDS)
        rate = (tokens - self._before) / seconds
        self._before, self._at = tokens, fleet.now
        return rate


@dataclass(slots=True)
class Hpa:
    """Pods by metric over target; up at most double or by four in 15 s, down to the highest wish of the window."""

    metric: Callable[[Fleet], float]
    target: float
    down_seconds: float = 300.0
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _next: float = 0.0

    def wanted(self, fleet: Fleet, now: float) -> int | None:
        if now < self._next:
            return None
        self._next = now + HPA_SECONDS
        current, ready = fleet.wanted, max(1, len(fleet.ready))
        total = self.metric(fleet)
        ratio = total / ready / self.target
        if ratio > 1:  # pods that are not ready count as idle
            ratio = max(1.0, total / max(current, ready) / self.target)
        pods = max(current, ready) if ratio > 1 else ready
        wish = current if abs(ratio - 1) <= TOLERANCE else math.ceil(pods * ratio - 1e-9)
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - self.down_seconds:
            self._wishes.popleft()
        wish = max(wish, min(current, max(replicas for _, replicas in self._wishes)))
        return max(1, min(wish, max(2 * current, current + 4)))


@dataclass(slots=True)
class Saturation:
    """WVA: a replica is saturated by KV use or queue; one more when the others have too little to spare on average,
    one less when the rest could take its share and still spare enough.
    """

    interval: float = 60.0
    kv_threshold: float = 0.8
    queue_threshold: float = 5.0
    kv_spare: float = 0.1
    queue_spare: float = 3.0
    _next: float = 0.0

    def wanted(self, fleet: Fleet, now: float) -> int | None:
        if now < self._next or len(fleet.ready) < len(fleet.staying):
            return None
        self._next = now + self.interval
        usage = [pod.worker.kv_used / pod.worker.limits.kv_tokens for pod in fleet.ready]
        queues = [float(len(pod.worker.queue)) for pod in fleet.ready]
        free = [
            (kv, queue)
            for kv, queue in zip(usage, queues, strict=True)
            if kv < self.kv_threshold and queue < self.queue_threshold
        ]
        count = fleet.wanted
        if not free or self._short([kv for kv, _ in free], [queue for _, queue in free], 1.0):
            return count + 1
        grown = count / max(1, count - 1)
        return count - 1 if count > 1 and not self._short(usage, queues, grown) else count

    def _short(self, usage: list[float], queues: list[float], grown: float) -> bool:
        kv = self.kv_threshold - grown * sum(usage) / len(usage)
        queue = self.queue_threshold - grown * sum(queues) / len(queues)
        return kv < self.kv_spare or queue < self.queue_spare


@dataclass(slots=True)
class Throughput:
    """Dynamo: next interval as the last one was; replicas by the tokens a second that a profiled worker has within
    the time between tokens asked for, corrected by what was measured against what was expected.
    """

    table: StepTable
    accepted: float
    """Accepted tokens of the profiled depth of 3."""
    interval: float = 180.0
    correction: bool = True
    _next: float = 0.0
    _arrived: int = 0
    _decode: tuple[float, float] = (0.0, 0.0)

    def wanted(self, fleet: Fleet, now: float) -> int | None:
        if now < self._next:
            return None
        first, self._next = self._next == 0.0, now + self.interval
        jobs = fleet.jobs[self._arrived : fleet.arrivals]
        self._arrived = fleet.arrivals
        seconds = sum(worker.decode_seconds for worker in fleet.workers)
        tokens = sum(worker.tokens for worker in fleet.workers)
        spent = (seconds - self._decode[0], tokens - self._decode[1])
        self._decode = (seconds, tokens)
        if first or not jobs:
            return fleet.wanted
        prompt, output = sum(job.prompt for job in jobs), sum(job.output for job in jobs)
        context = (prompt + output / 2) / len(jobs)
        rate, itl = self._profile(fleet, context)
        if self.correction and spent[1] > 0:
            rate /= min(3.0, max(0.5, spent[0] / spent[1] / itl))
        prefill = self.table.prefill_seconds(2048.0) / 2048.0
        return math.ceil(output / self.interval / rate + prompt * prefill / self.interval)

    def _profile(self, fleet: Fleet, context: float) -> tuple[float, float]:
        """(tokens a second, seconds between tokens) at the most sequences that keep to the objective."""
        best = (1.0, fleet.trace.ttit_seconds)
        for sequences in range(1, fleet.trace.limits.max_num_seqs + 1):
            step = self.table.seconds(sequences, 4 * sequences, 3, sequences * context)
            itl = step / (1 + self.accepted)
            if itl <= fleet.trace.ttit_seconds or sequences == 1:
                best = (sequences / itl, itl)
        return best
