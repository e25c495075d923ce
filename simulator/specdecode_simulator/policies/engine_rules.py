"""Rules that other engines have inside: depth from batch size, acceptance or goodput, without an operator.

Rules after the source of vLLM 0.33 (adaptive verification) and SGLang 0.5.23 (adaptive speculative decoding), see
`upstream_rules`, and after public documentation of vLLM (dynamic speculative decoding by batch size), TensorRT-LLM
(acceptance window and threshold, one way) and TurboSpec's paper (arXiv 2406.14066); written for this simulator. One
instance a worker. None sees tasks; what is profiled offline is the table of a quiet machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specdecode_simulator.policies.upstream_rules import AcceptanceEstimator, StepCandidates, StepSlot, slot_of
from specdecode_simulator.records.acceptance_walks import VERIFIED, Form, Records, Trim, chain
from specdecode_simulator.records.step_times import StepTable
from specdecode_simulator.traces.trace import Kind
from specdecode_simulator.world.segment import Load, Outcome, Segment

DEEPEST = 7
SEGMENT_STEPS = 32
GRADED = 32
"""Drafts of one kind that stand for all of a segment, where confidence is calibrated."""


@dataclass(slots=True)
class Fixed:
    """The same depth whatever happens."""

    depth: int

    def next(self, load: Load) -> Segment:
        return Segment(dict.fromkeys(load.groups, chain(self.depth)))

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        pass


@dataclass(slots=True)
class BatchTable:
    """vLLM: depth by the number of running sequences. ``edges`` are upper and inclusive; beyond the last the last."""

    edges: tuple[int, ...]
    depths: tuple[int, ...]

    def next(self, load: Load) -> Segment:
        at = sum(load.sequences > edge for edge in self.edges)
        return Segment(dict.fromkeys(load.groups, chain(self.depths[at])), SEGMENT_STEPS)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        pass


@dataclass(slots=True)
class AdaptiveVerification:
    """vLLM 0.33: drafts ``drafted`` tokens always, and verifies as many of each request as bring most tokens a second.

    A token's confidence is a logistic model of the draft's own probability, refitted every 100 steps. The budget comes
    from cost curves. Where upstream weighs all tokens of a batch at once, each request here weighs its own against the
    mean of the others in the segment before; alone, both are the same.
    """

    table: StepTable
    records: Records
    kinds: Sequence[Kind]
    quality: Callable[[int, float, int], float]
    drafted: int
    estimator: AcceptanceEstimator = field(init=False)
    _generator: Any = field(default_factory=lambda: np.random.default_rng(20261127))
    _tokens: float = 1.0
    """Tokens of a step of one request, beyond the first, in the segment before; and its verified draft tokens."""
    _verified: float = 1.0
    _graded: int = 0

    def __post_init__(self) -> None:
        self.estimator = AcceptanceEstimator(self.drafted)

    def next(self, load: Load) -> Segment:
        others, context = load.sequences - 1, 256.0 * max(0.5, round(load.kv_tokens / load.sequences / 256))
        verified = load.sequences + round(2 * others * self._verified) / 2
        step = self.table.at_load(load.sequences, context * load.sequences)
        seconds = [step(verified + count, self.drafted) for count in range(self.drafted + 1)]
        trim = Trim(
            slope=round(self.estimator.slope, 1),
            intercepts=tuple(round(float(each), 1) for each in self.estimator.intercepts),
            other_tokens=round(others * (1 + self._tokens), 0 if others > 4 else 1),
            costs=tuple(round(each / seconds[0], 3) for each in seconds),
        )
        form = replace(chain(self.drafted), trim=trim)
        return Segment(dict.fromkeys(load.groups, form), SEGMENT_STEPS, drafted_depth=self.drafted)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        """Grade as many drafts as there were, drawn from the record of each kind."""
        steps = max(1.0, outcome.sequences * outcome.steps)
        self._tokens = outcome.emitted / steps - 1
        self._verified = sum(float(sums[VERIFIED]) for sums in outcome.runs.values()) / steps
        for group, count in load.groups.items():
            features, right = self.records.sample(
                self.kinds[group.kind].domain,
                self.quality(group.kind, load.now, group.context),
                GRADED,
                self._generator,
            )
            features = features[:, : self.drafted]
            admitted = np.full(GRADED, max(1, round(self._verified)))
            accepted = np.minimum(right, admitted)
            times = count * outcome.steps / GRADED
            self.estimator.add(features, self.estimator.predict(features), accepted, admitted, times)
        self._graded += outcome.steps
        if self._graded >= self.estimator.interval:
            self._graded = 0
            self.estimator.refit()


@dataclass(slots=True)
class StepTiers:
    """SGLang 0.5.23: a moving average of accepted tokens chooses the passes (or 0), apart for each size of the batch.

    A segment is as long as the time between two choices.
    """

    table: Mapping[int, StepCandidates]
    alpha: float
    interval: int = 5
    _slots: dict[int, StepSlot] = field(default_factory=dict)

    def next(self, load: Load) -> Segment:
        return Segment(dict.fromkeys(load.groups, chain(self._slot(load.sequences).steps)), self.interval)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        accepted = sum(float(sums[8]) for sums in outcome.runs.values())
        slot = self._slot(load.sequences)
        for _ in range(outcome.steps):
            slot.update(accepted / max(1.0, outcome.sequences * outcome.steps))

    def _slot(self, sequences: int) -> StepSlot:
        size = slot_of(sorted(self.table), sequences)
        if size not in self._slots:
            self._slots[size] = StepSlot(self.table[size], alpha=self.alpha, interval=self.interval)
        return self._slots[size]


@dataclass(slots=True)
class OneWayGate:
    """TensorRT-LLM: speculation ends for good once the mean acceptance of a window of requests is below a threshold."""

    depth: int
    window: int
    threshold: float
    """Accepted tokens of a draft, beyond the target's own."""
    _recent: deque[float] = field(default_factory=deque)
    _closed: bool = False
    _steps: float = 0.0

    def next(self, load: Load) -> Segment:
        return Segment(dict.fromkeys(load.groups, chain(0 if self._closed else self.depth)), SEGMENT_STEPS)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        if self._closed:
            return
        steps = max(1.0, outcome.sequences * outcome.steps)
        self._recent.append(sum(float(sums[8]) for sums in outcome.runs.values()) / steps)
        if len(self._recent) > self.window:
            self._recent.popleft()
            self._closed = sum(self._recent) / len(self._recent) < self.threshold


@dataclass(slots=True)
class Goodput:
    """TurboSpec: the depth of most goodput by a step time fitted offline and a moving average of acceptance.

    One acceptance rate for all depths and requests; tokens are those of a geometric chain.
    """

    fit: Callable[[float, float, float, float], float]
    """Seconds by (sequences, verified tokens, passes, KV tokens)."""
    alpha: float
    interval: int
    _rate: float = 0.7
    _depth: int = 3
    _since: int = 10**9

    def next(self, load: Load) -> Segment:
        if self._since >= self.interval:
            self._since = 0
            self._depth = max(range(DEEPEST + 1), key=lambda depth: self._goodput(load, depth))
        # Runs are counted along the record at depth 0 too: a real engine would have to try a token now and then.
        form: Form = chain(self._depth)
        return Segment(dict.fromkeys(load.groups, form), SEGMENT_STEPS)

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None:
        self._since += outcome.steps
        steps = max(1.0, outcome.sequences * outcome.steps)
        reached = hits = 0.0
        depth = max(self._depth, 1)
        for sums in outcome.runs.values():
            hits += float(sums[:depth].sum())
            reached += float(sums[: depth - 1].sum())
        reached += steps
        weight = (1 - self.alpha) ** outcome.steps
        self._rate = weight * self._rate + (1 - weight) * min(0.99, hits / reached)

    def _goodput(self, load: Load, depth: int) -> float:
        tokens = sum(self._rate**level for level in range(depth + 1))
        verify = load.sequences * (depth + 1)
        return tokens / max(1e-9, self.fit(load.sequences, verify, depth, load.kv_tokens))
